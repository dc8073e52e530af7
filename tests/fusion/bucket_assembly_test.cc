#include "fusion/bucket_assembly.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/calling_watcher.h"

namespace sirtaki::fusion {
namespace {

using Arrival = BucketAssembly::Arrival;
using core::HandleState;
using core::Work;

core::SignaturePtr SignatureOf(std::size_t parts) {
  auto signature = std::make_shared<core::Signature>();
  signature->layout = 7;
  for (std::size_t i = 0; i < parts; ++i) {
    signature->parts.push_back(std::make_shared<core::Signature>());
  }
  return signature;
}

core::WorkPtr Part(bool absent = false, const std::string& invalid = {}) {
  auto work = std::make_shared<Work>();
  if (absent) work->request.absent = {true};
  work->request.invalid = invalid;
  return work;
}

// Submit does what a session does.
void Submit(BucketAssembly& bucket, std::atomic<int>* observed = nullptr) {
  const core::WorkPtr whole = bucket.Assemble();
  whole->handle = std::make_shared<HandleState>(tests::WhenObserved([observed] {
    if (observed != nullptr) ++*observed;
  }));
  bucket.NoteSubmitted(whole);
}

const core::Key kKey = core::Key::Bucket(core::kWorldSet, 1, 2);

TEST(BucketAssemblyTest, TheLastPartMakesTheRequest) {
  BucketAssembly bucket(kKey, SignatureOf(3));
  const core::WorkPtr middle = Part();
  EXPECT_EQ(bucket.Put(2, Part()), Arrival::kEarly);
  EXPECT_EQ(bucket.Put(1, middle), Arrival::kEarly);
  EXPECT_EQ(bucket.handle(), nullptr);
  EXPECT_EQ(bucket.Put(0, Part()), Arrival::kLast);
  const core::WorkPtr whole = bucket.Assemble();
  EXPECT_EQ(whole->request.key, kKey);
  EXPECT_EQ(whole->request.signature()->layout, 7u);
  EXPECT_TRUE(whole->request.absent.empty()) << "all are there";
  EXPECT_TRUE(whole->request.invalid.empty());
  ASSERT_EQ(whole->parts.size(), 3u);
  EXPECT_EQ(whole->parts[1], middle);
}

TEST(BucketAssemblyTest, SaysWhatIsAbsentAndWhatIsInvalid) {
  BucketAssembly bucket(kKey, SignatureOf(3));
  bucket.Put(2, Part(false, "too late"));
  bucket.Put(0, Part(true));
  bucket.Put(1, Part(false, "of no type"));
  const core::WorkPtr whole = bucket.Assemble();
  EXPECT_EQ(whole->request.absent, (std::vector<bool>{true, false, false}));
  EXPECT_EQ(whole->request.invalid, "of no type");
}

// The text is that of the first part that is invalid, whichever refuses.
TEST(BucketAssemblyTest, APartThatRefusesMakesTheWholeARefusal) {
  for (const std::size_t count : {1, 3}) {
    auto signature = SignatureOf(count == 1 ? 0 : count);
    BucketAssembly bucket(kKey, signature);
    for (std::size_t i = 0; i < count; ++i) {
      const core::WorkPtr part = Part(false, "of no type");
      if (i + 1 == count) part->request.asked = core::Refusal{};
      bucket.Put(i, part);
    }
    const core::WorkPtr whole = bucket.Assemble(/*round=*/2);
    EXPECT_EQ(whole->request.asked, core::Asked(core::Refusal{})) << count;
    EXPECT_EQ(whole->request.signature(), nullptr);
    EXPECT_EQ(whole->request.invalid, "of no type");
  }
}

TEST(BucketAssemblyTest, ARoundEndsWithItsLastRelease) {
  std::atomic<int> observed{0};
  BucketAssembly bucket(kKey, SignatureOf(2));
  for (int round = 1; round <= 3; ++round) {
    EXPECT_EQ(bucket.Put(0, Part()), Arrival::kEarly);
    EXPECT_EQ(bucket.Put(1, Part()), Arrival::kLast);
    Submit(bucket, &observed);
    ASSERT_NE(bucket.handle(), nullptr);
    EXPECT_EQ(bucket.Put(0, Part()), Arrival::kInFlight);
    bucket.Release(0);
    EXPECT_EQ(bucket.Put(0, Part()), Arrival::kInFlight) << "part 1 is still in use";
    EXPECT_EQ(observed, round - 1);
    bucket.Release(1);
    EXPECT_EQ(observed, round) << "the key is free again";
    EXPECT_EQ(bucket.handle(), nullptr);
  }
}

TEST(BucketAssemblyTest, OneThatWasNotSubmittedMayBeFilledAnew) {
  BucketAssembly bucket(kKey, SignatureOf(2));
  bucket.Put(0, Part());
  bucket.Release(0);
  EXPECT_EQ(bucket.Put(1, Part()), Arrival::kEarly);
  EXPECT_EQ(bucket.Put(0, Part()), Arrival::kLast);
  // Its submission was refused.
  bucket.Release(1);
  bucket.Release(0);
  EXPECT_EQ(bucket.Put(0, Part()), Arrival::kEarly);
  EXPECT_EQ(bucket.Put(1, Part()), Arrival::kLast);
}

TEST(BucketAssemblyTest, TellsWhichPartsNobodyHad) {
  BucketAssembly bucket(kKey, SignatureOf(2));
  bucket.Put(0, Part(true));
  bucket.Put(1, Part());
  Submit(bucket);
  // The engine does the same.
  bucket.handle()->SetAbsentParts({true, false});
  bucket.handle()->Complete(core::Status::Ok());
  EXPECT_TRUE(bucket.AbsentEverywhere(0));
  EXPECT_FALSE(bucket.AbsentEverywhere(1));
}

// A gradient that goes by itself: no grouped call, but its own.
TEST(BucketAssemblyTest, OfOneTheRequestIsThatOfItsGradient) {
  std::atomic<int> observed{0};
  const core::Key key = core::Key::Named(core::kWorldSet, "gradient/w");
  auto signature = std::make_shared<core::Signature>();
  signature->shape = {3};
  BucketAssembly bucket(key, signature);
  EXPECT_TRUE(bucket.of_one());
  const core::WorkPtr work = Part(/*absent=*/true);
  for (int round = 1; round <= 2; ++round) {
    EXPECT_EQ(bucket.Put(0, work), Arrival::kLast);
    EXPECT_EQ(bucket.Assemble(), work) << "nothing is made for it";
    EXPECT_EQ(work->request.key, key);
    EXPECT_EQ(work->request.signature(), signature);
    EXPECT_EQ(work->request.absent, std::vector<bool>{true});
    EXPECT_TRUE(work->parts.empty());
    Submit(bucket, &observed);
    EXPECT_EQ(bucket.Put(0, work), Arrival::kInFlight);
    EXPECT_FALSE(bucket.AbsentEverywhere(0));
    bucket.handle()->SetAbsentParts({true});
    EXPECT_TRUE(bucket.AbsentEverywhere(0));
    bucket.Release(0);
    EXPECT_EQ(observed, round) << "the name is free again";
    EXPECT_EQ(work.use_count(), 1) << "so that it can serve again";
  }
  bucket.Put(0, work);
  EXPECT_EQ(bucket.Assemble(/*round=*/2)->request.signature()->round, 2u);
  EXPECT_EQ(signature->round, 0u);
}

TEST(BucketAssemblyTest, ItsEndGivesTheKeyFree) {
  std::atomic<int> observed{0};
  {
    BucketAssembly bucket(kKey, SignatureOf(1));
    EXPECT_EQ(bucket.Put(0, Part()), Arrival::kLast);
    Submit(bucket, &observed);
  }
  EXPECT_EQ(observed, 1);
}

// Hooks of several threads fill the same buckets at once: each is submitted once a round, by a
// thread that sees what all of them have put.
TEST(BucketAssemblyTest, ThreadsFillTheBucketsTogether) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kBuckets = 20;
  constexpr int kRounds = 50;
  std::deque<BucketAssembly> buckets;
  for (std::size_t b = 0; b < kBuckets; ++b) buckets.emplace_back(kKey, SignatureOf(kThreads));
  std::atomic<int> submitted{0};
  std::atomic<int> wrong{0};
  std::barrier round(kThreads + 1);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int r = 1; r <= kRounds; ++r) {
        round.arrive_and_wait();
        for (std::size_t i = 0; i < kBuckets; ++i) {
          BucketAssembly& bucket = buckets[(i * 7 + t * 5) % kBuckets];
          const core::WorkPtr part = Part();
          part->rows = r;
          const Arrival arrival = bucket.Put(t, part);
          wrong += arrival == Arrival::kInFlight;
          if (arrival != Arrival::kLast) continue;
          ++submitted;
          Submit(bucket);
          const core::WorkPtr whole = bucket.Assemble();
          for (const core::WorkPtr& put : whole->parts) wrong += put->rows != r;
        }
        round.arrive_and_wait();
      }
    });
  }
  for (int r = 0; r < kRounds; ++r) {
    round.arrive_and_wait();
    round.arrive_and_wait();
    EXPECT_EQ(submitted.exchange(0), static_cast<int>(kBuckets));
    for (BucketAssembly& bucket : buckets) {
      for (std::size_t t = 0; t < kThreads; ++t) bucket.Release(t);
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(BucketAssemblyTest, TheRequestSaysWhichAverageItIs) {
  BucketAssembly bucket(kKey, SignatureOf(1));
  EXPECT_EQ(bucket.Put(0, Part()), Arrival::kLast);
  const core::WorkPtr first = bucket.Assemble();
  const core::WorkPtr third = bucket.Assemble(/*round=*/3);
  EXPECT_EQ(third->request.signature()->round, 3u);
  EXPECT_EQ(third->request.signature()->layout, 7u);
  EXPECT_FALSE(*third->request.signature() == *first->request.signature())
      << "ranks at different averages do not fit";
}

}  // namespace
}  // namespace sirtaki::fusion
