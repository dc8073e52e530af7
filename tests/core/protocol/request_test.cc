#include "core/protocol/request.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <unordered_set>

namespace sirtaki::core {
namespace {

TEST(KeyTest, TextSaysWhichForm) {
  EXPECT_EQ(Key::Named(0, "layer1.weight").ToString(), "\"layer1.weight\"");
  EXPECT_EQ(Key::Unnamed(0, 7).ToString(), "unnamed call #7");
  EXPECT_EQ(Key::Bucket(0, 1, 3).ToString(), "bucket 3 of arena 1");
  const std::uint64_t laid_out_twice = std::uint64_t{1} << 32U | 1U;
  EXPECT_EQ(Key::Bucket(2, laid_out_twice, 3).ToString(),
            "bucket 3 of arena 1, layout 2 of process set 2");
  const std::uint64_t since_a_join = std::uint64_t{3} << 48U | 1U;
  EXPECT_EQ(Key::Bucket(0, since_a_join, 3).ToString(),
            "bucket 3 of arena 1, layout 1 since join 3");
}

TEST(KeyTest, TextOfACallOfTheLibrarySaysWhatItIsFor) {
  EXPECT_EQ(Key::Named(0, "#the table at the end").ToString(), "the table at the end");
  EXPECT_EQ(Key::Named(2, "#a\n").ToString(), "a\\n of process set 2");
  EXPECT_EQ(Key::Named(0, "sirtaki/check_parameters").ToString(), "check_parameters");
  EXPECT_EQ(Key::Named(0, "sirtaki/the exchange of sizes/bytes").ToString(),
            "the exchange of sizes");
  for (const char* const name : {"sirtaki", "sirtaki/", "my/sirtaki/w", "#"}) {
    EXPECT_EQ(Key::Named(0, name).ToString(), '"' + std::string(name) + '"');
  }
}

TEST(KeyTest, TextEscapesAndShortensTheName) {
  EXPECT_EQ(Key::Named(0, "a\n\x07\xff").ToString(), "\"a\\n\\x07\\xff\"");
  EXPECT_EQ(Key::Named(0, std::string(300, 'a')).ToString(),
            "\"" + std::string(80, 'a') + "..." + std::string(40, 'a') + "\" (300 bytes)");
}

TEST(KeyTest, TextNamesASetThatIsNotTheWorld) {
  EXPECT_EQ(Key::Named(2, "w").ToString(), "\"w\" of process set 2");
}

TEST(KeyTest, FormsNeverCollide) {
  const std::unordered_set<Key, KeyHash> keys = {
      Key::Named(0, "w"),   Key::Named(1, "w"),   Key::Named(0, "v"),   Key::Unnamed(0, 0),
      Key::Unnamed(0, 1),   Key::Unnamed(1, 0),   Key::Bucket(0, 0, 0), Key::Bucket(0, 0, 1),
      Key::Bucket(0, 1, 0), Key::Bucket(1, 0, 0),
  };
  EXPECT_EQ(keys.size(), 10U);
  EXPECT_EQ(keys.count(Key::Bucket(0, 1, 0)), 1U);
}

Signature Example() {
  Signature signature;
  signature.shape = {3, 4};
  return signature;
}

TEST(KeyTest, NamesAreEqualByTheirTextsWhetherTheyShareItOrNot) {
  const Key key = Key::Named(0, "w");
  const Key copy = key;
  EXPECT_EQ(&copy.name.text(), &key.name.text());
  const Key same = Key::Named(0, std::string("w"));
  EXPECT_EQ(same, key);
  EXPECT_EQ(KeyHash()(same), KeyHash()(key));
  EXPECT_NE(Key::Named(0, "v"), key);
  EXPECT_NE(Key::Named(0, ""), key);
  EXPECT_TRUE(Key::Named(0, "").name.empty());
}

TEST(SignatureTest, TextNamesOnlyWhatIsNotDefault) {
  Signature signature = Example();
  EXPECT_EQ(signature.ToString(), "all-reduce(sum) of float32 [3, 4]");
  signature.reduction = ReduceOp::kAverage;
  signature.dtype = DType::kBF16;
  signature.prescale = 0.5;
  signature.postscale = 3;
  signature.device = DeviceKind::kCuda;
  signature.slot = 1;
  signature.layout = 255;
  EXPECT_EQ(
      signature.ToString(),
      "all-reduce(average) of bfloat16 [3, 4] on CUDA device slot 1, prescale 0.5, postscale 3, "
      "bucket layout ff");
}

TEST(SignatureTest, TextSaysWhatItTravelsAs) {
  Signature signature = Example();
  signature.reduction = ReduceOp::kAverage;
  signature.wire = DType::kBF16;
  EXPECT_EQ(signature.ToString(), "all-reduce(average) of float32 [3, 4] as bfloat16");
}

TEST(SignatureTest, TextOfABroadcastNamesItsRoot) {
  Signature signature = Example();
  signature.kind = OpKind::kBroadcast;
  signature.root = 2;
  signature.shape = {};
  EXPECT_EQ(signature.ToString(), "broadcast from rank 2 of float32 []");
}

TEST(SignatureTest, TextOfAnAllGatherLeavesTheFirstDimensionOpen) {
  Signature signature = Example();
  signature.kind = OpKind::kAllGather;
  EXPECT_EQ(signature.ToString(), "all-gather of float32 [*, 3, 4]");
}

TEST(SignatureTest, EveryFieldCounts) {
  const Signature example = Example();
  Signature others[12];
  for (Signature& other : others) other = example;
  others[0].kind = OpKind::kAllGather;
  others[1].reduction = ReduceOp::kAverage;
  others[2].dtype = DType::kF64;
  others[3].device = DeviceKind::kCuda;
  others[4].slot = 1;
  others[5].root = 0;
  others[6].shape = {4, 3};
  others[7].prescale = 2;
  others[8].postscale = 2;
  others[9].layout = 1;
  others[10].wire = DType::kF16;
  others[11].wire = DType::kBF16;
  std::unordered_set<Signature, SignatureHash> all = {example};
  for (const Signature& other : others) {
    EXPECT_FALSE(example == other) << other.ToString();
    all.insert(other);
  }
  EXPECT_EQ(all.size(), 13U);
  EXPECT_EQ(SignatureHash()(example), SignatureHash()(Example()));
}

TEST(SignatureTest, FactorsAreComparedByTheirBits) {
  Signature a = Example();
  Signature b = Example();
  a.prescale = b.prescale = std::nan("");
  EXPECT_TRUE(a == b);
  EXPECT_EQ(SignatureHash()(a), SignatureHash()(b));
  a.prescale = 0.0;
  b.prescale = -0.0;
  EXPECT_FALSE(a == b);
}

TEST(SignatureTest, CountsElements) {
  Signature signature;
  signature.shape = {};
  EXPECT_EQ(signature.ElementCount(), 1);
  signature.shape = {3, 4, 5};
  EXPECT_EQ(signature.ElementCount(), 60);
  signature.shape = {std::int64_t{1} << 40, 0, std::int64_t{1} << 40};
  EXPECT_EQ(signature.ElementCount(), 0);
}

TEST(SignatureTest, CountSaturatesInsteadOfWrapping) {
  Signature signature;
  signature.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40, 3};
  EXPECT_EQ(signature.ElementCount(), std::numeric_limits<std::int64_t>::max());
}

}  // namespace
}  // namespace sirtaki::core
