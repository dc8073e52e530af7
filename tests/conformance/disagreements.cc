#include "tests/conformance/disagreements.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/calls.h"
#include "tests/conformance/tensors.h"

namespace sirtaki::tests::conformance {
namespace {

using ::testing::HasSubstr;

// What one rank asks for.
struct Ask {
  Problem problem;
  std::vector<std::int64_t> shape = {12, 4};  // twelve rows: a part for each of 1 to 4 ranks
  int root = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  Compression compression = Compression::None;
  int tensors = 0;              // of a group; 0: not grouped
  std::int64_t last_extra = 0;  // columns that the group's last tensor has more
};

// One attribute: how the odd rank's request differs, and the words by which each side is told.
struct Attribute {
  std::string name;
  std::function<void(Ask*)> change;
  std::string usual;
  std::string changed;
  int tensors = 0;  // of the usual request
};

std::string KindName(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all-reduce";
    case Collective::kReduce:
      return "reduce";
    case Collective::kReduceScatter:
      return "reduce-scatter";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllGather:
    case Collective::kAllGatherInto:
      return "all-gather";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
    case Collective::kScatterSplits:
      return "scatter";
    default:
      return "all-to-all";
  }
}

// The first dimension may differ by rank.
bool RowsVary(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kScatterSplits:
    case Collective::kAllToAll:
    case Collective::kAllToAllSplits:
      return true;
    default:
      return false;
  }
}

Ask UsualAsk(Collective collective, int tensors) {
  Ask ask;
  ask.problem.collective = collective;
  ask.tensors = tensors;
  return ask;
}

std::vector<Attribute> AttributesOf(Collective collective) {
  const auto other =
      collective == Collective::kAllReduce ? Collective::kBroadcast : Collective::kAllReduce;
  std::vector<Attribute> attributes = {
      {"kind", [other](Ask* ask) { ask->problem.collective = other; }, KindName(collective),
       KindName(other)},
      {"dtype", [](Ask* ask) { ask->problem.dtype = core::DType::kF64; }, "float32", "float64"},
      {"columns", [](Ask* ask) { ask->shape[1] = 5; }, ", 4]", ", 5]"},
      {"dimensions", [](Ask* ask) { ask->shape.push_back(1); }, ", 4]", ", 4, 1]"},
      {"tensors", [](Ask* ask) { ask->tensors = 3; }, "2", "3", 2},
      {"the group's last", [](Ask* ask) { ask->last_extra = 3; }, ", 4]", ", 7]", 2},
      {"grouped or not", [](Ask* ask) { ask->tensors = 2; }, "on rank", "2 tensors"},
  };
  if (!RowsVary(collective)) {
    attributes.push_back({"rows", [](Ask* ask) { ask->shape[0] = 24; }, "[12, 4]", "[24, 4]"});
  }
  if (HasRoot(collective)) {
    attributes.push_back({"root", [](Ask* ask) { ask->root = 1; }, "root 0", "root 1"});
  }
  if (Reduces(collective)) {
    attributes.push_back(
        {"operation", [](Ask* ask) { ask->problem.op = core::ReduceOp::kMax; }, "sum", "max"});
    attributes.push_back(
        {"prescale", [](Ask* ask) { ask->prescale = 0.5; }, "prescale 1", "prescale 0.5"});
    attributes.push_back(
        {"postscale", [](Ask* ask) { ask->postscale = 0.25; }, "postscale 1", "postscale 0.25"});
  }
  if (collective == Collective::kAllReduce) {
    attributes.push_back({"compression", [](Ask* ask) { ask->compression = Compression::BF16; },
                          "not compressed", "bfloat16"});
  }
  return attributes;
}

std::string RanksText(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end > i + 1) text += "-" + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

std::vector<int> AllBut(int odd, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (rank != odd) ranks.push_back(rank);
  }
  return ranks;
}

Outcome Call(const Ask& ask, const std::string& name) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < std::max(ask.tensors, 1); ++i) {
    auto shape = ask.shape;
    if (i > 0 && i + 1 == ask.tensors) shape[1] += ask.last_extra;
    tensors.push_back(at::ones(shape, TypeOf(ask.problem.dtype)));
  }
  Arguments arguments;
  arguments.name = name;
  arguments.root = ask.root;
  arguments.prescale = ask.prescale;
  arguments.postscale = ask.postscale;
  arguments.compression = ask.compression;
  const Form form = ask.tensors > 0 ? Form::kGrouped : Form::kBlocking;
  return CallAndWait(ask.problem, form, tensors, arguments);
}

// The text of the error that it throws, which has this code.
std::string TextOf(ErrorCode code, const std::string& what, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code))
        << what << ": " << error.what();
    return error.what();
  }
  ADD_FAILURE() << what << ": nothing was thrown; expected: " << error_code_name(code);
  return {};
}

// Everyone asks for the same: of ones come ones, or as many as there are ranks.
void ExpectWorks(const Ask& ask, const std::string& name, const std::string& after) {
  const Outcome outcome = Call(ask, name);
  for (const at::Tensor& tensor : outcome.tensors) {
    const bool summed =
        Reduces(ask.problem.collective) &&
        (ask.problem.collective != Collective::kReduce || sirtaki::rank() == ask.root);
    const double wanted = summed ? sirtaki::size() : 1;
    EXPECT_TRUE(tensor.eq(wanted).all().item<bool>()) << name << " after " << after;
  }
}

void ExpectMismatch(Collective collective, const Attribute& attribute, int odd,
                    const std::string& name) {
  const int rank = sirtaki::rank();
  const Ask usual = UsualAsk(collective, attribute.tensors);
  Ask mine = usual;
  if (rank == odd) attribute.change(&mine);
  const std::string what = std::string(NameOf(collective)) + ", " + attribute.name +
                           " differs on rank " + std::to_string(odd) + ", seen by rank " +
                           std::to_string(rank);
  const std::string text = TextOf(ErrorCode::Mismatch, what, [&] { Call(mine, name); });
  const std::string others = "on " + RanksText(AllBut(odd, sirtaki::size()));
  for (const std::string& word :
       {name.empty() ? std::string("unnamed call #") : "\"" + name + "\"", others,
        "on rank " + std::to_string(odd), attribute.usual, attribute.changed}) {
    EXPECT_THAT(text, HasSubstr(word)) << what;
  }
}

}  // namespace

void RunMismatches(Collective collective, int odd) {
  // Three times: the first gives the id, the others use it.
  for (const int tensors : {0, 2}) {
    const std::string name = tensors == 0 ? "layer1.weight" : "layer1";
    for (int i = 0; i < 3; ++i) {
      ExpectWorks(UsualAsk(collective, tensors), name, "nothing");
    }
  }
  for (const Attribute& attribute : AttributesOf(collective)) {
    const std::string name = attribute.tensors == 0 ? "layer1.weight" : "layer1";
    ExpectMismatch(collective, attribute, odd, name);
    const Ask usual = UsualAsk(collective, attribute.tensors);
    ExpectWorks(usual, name, attribute.name);
    ExpectMismatch(collective, attribute, odd, "");
    ExpectWorks(usual, "", attribute.name);
    ExpectWorks(usual, name, attribute.name);
  }
}

void RunThreeWayMismatch() {
  const int rank = sirtaki::rank();
  Ask ask = UsualAsk(Collective::kAllReduce, 0);
  ask.shape[0] = 2 + std::min(rank, 2);
  const std::string text = TextOf(ErrorCode::Mismatch, "three groups", [&] { Call(ask, "w"); });
  const std::string rest = sirtaki::size() == 3 ? "rank 2" : "ranks 2-3";
  EXPECT_THAT(text, HasSubstr("[2, 4] on rank 0, shape [3, 4] on rank 1, shape [4, 4] on " + rest));
  ExpectWorks(UsualAsk(Collective::kAllReduce, 0), "w", "three groups");
}

namespace {

// What one rank passes that is wrong by itself, and the words that say so.
struct Wrong {
  Collective collective;
  std::vector<std::int64_t> shape;
  core::DType dtype;
  std::vector<std::int64_t> splits;
  int root;
  std::string word;
};

std::vector<Wrong> WrongArguments(int size) {
  using core::DType;
  const std::vector<std::int64_t> usual = {12, 4};
  std::vector<std::int64_t> negative(static_cast<std::size_t>(size), 12);
  negative[0] = -12 * (size - 2);
  std::vector<std::int64_t> short_sum(static_cast<std::size_t>(size), 1);
  const std::vector<std::int64_t> too_many(static_cast<std::size_t>(size) + 1, 0);
  std::vector<Wrong> wrong = {
      {Collective::kAllGather, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kAllGatherInto, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kGather, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kScatter, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kAllToAll, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kReduceScatter, {}, DType::kF32, {}, 0, "dimension"},
      {Collective::kAllReduce, usual, DType::kBool, {}, 0, "bool"},
      {Collective::kAllReduce, usual, DType::kF8E5M2, {}, 0, "float8_e5m2"},
      {Collective::kReduce, usual, DType::kBool, {}, 0, "bool"},
      {Collective::kReduceScatter, usual, DType::kF8E4M3FN, {}, 0, "float8_e4m3fn"},
      {Collective::kAllToAllSplits, usual, DType::kF32, short_sum, 0, "12"},
      {Collective::kAllToAllSplits, usual, DType::kF32, too_many, 0, "splits"},
      {Collective::kBroadcast, usual, DType::kF32, {}, size, "root"},
      {Collective::kReduce, usual, DType::kF32, {}, -1, "root"},
      {Collective::kGather, usual, DType::kF32, {}, size, "root"},
      {Collective::kScatter, usual, DType::kF32, {}, size, "root"},
  };
  if (size > 1) {
    wrong.push_back({Collective::kAllToAll, {size + 1, 4}, DType::kF32, {}, 0, "divi"});
  }
  if (size > 2) {
    wrong.push_back({Collective::kAllToAllSplits, usual, DType::kF32, negative, 0, "negative"});
  }
  return wrong;
}

Outcome CallWith(const Wrong& with) {
  Ask ask = UsualAsk(with.collective, 0);
  ask.problem.dtype = with.dtype;
  Arguments arguments;
  arguments.name = "w";
  arguments.root = with.root;
  arguments.splits = with.splits;
  return CallAndWait(ask.problem, Form::kBlocking, {at::ones(with.shape).to(TypeOf(with.dtype))},
                     arguments);
}

}  // namespace

void RunWrongArguments(int odd) {
  const int rank = sirtaki::rank();
  const int size = sirtaki::size();
  for (const Wrong& wrong : WrongArguments(size)) {
    const Wrong usual = {wrong.collective, {12, 4}, core::DType::kF32, {}, 0, ""};
    const std::string what = std::string(NameOf(wrong.collective)) + " with a wrong " + wrong.word +
                             " on rank " + std::to_string(odd);
    const std::string text =
        TextOf(ErrorCode::InvalidArgument, what, [&] { CallWith(rank == odd ? wrong : usual); });
    EXPECT_THAT(text, HasSubstr(wrong.word)) << what;
    EXPECT_THAT(text, HasSubstr("\"w\"")) << what;
    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(odd))) << what;
    ExpectWorks(UsualAsk(wrong.collective, 0), "w", what);
  }
}

void RunWrongSets() {
  const int rank = sirtaki::rank();
  const ProcessSet first = add_process_set({0});
  const auto call = [&] {
    allreduce(at::ones({2}), AllreduceOptions().name("w").process_set(first));
  };
  if (rank == 0) {
    call();
  } else {
    TextOf(ErrorCode::InvalidArgument, "a call on a set without this rank", call);
  }
  // A root that is a rank of the job, but not of the set.
  if (rank == 0) {
    const auto options = BroadcastOptions().name("w").process_set(first);
    const std::string text = TextOf(ErrorCode::InvalidArgument, "a root outside the set",
                                    [&] { broadcast(at::ones({2}), 1, options); });
    EXPECT_THAT(text, HasSubstr("root"));
    call();
  }
  TextOf(ErrorCode::InvalidArgument, "a set with a rank that is none", [&] {
    add_process_set({0, sirtaki::size()});
  });
  TextOf(ErrorCode::Mismatch, "sets that differ", [&] { add_process_set({rank == 0 ? 0 : 1}); });
  remove_process_set(first);
  TextOf(ErrorCode::InvalidArgument, "a call on a set that was removed", call);
  ExpectWorks(UsualAsk(Collective::kAllReduce, 0), "w", "wrong sets");
}

}  // namespace sirtaki::tests::conformance
