#include "frameworks/torch/state/archive_broadcast.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::detail {
namespace {

using sirtaki::tests::ErrorOf;
using sirtaki::tests::RunTorchRanks;
using testing::HasSubstr;

// Otherwise large states would be held twice, and nobody would notice.
TEST(SurveyTest, TensorsOfAnArchiveAreHoles) {
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 900; ++i) tensors.push_back(torch::ones({i % 2 == 0 ? 2000 : 1}));
  const Skeleton skeleton = Survey([&](const WriteBytes& write) { torch::save(tensors, write); });
  EXPECT_EQ(skeleton.holes.size(), 450u);
  std::uint64_t sum = 0;
  for (const Hole& hole : skeleton.holes) {
    EXPECT_EQ(hole.bytes, 8000u);
    sum += hole.bytes;
  }
  EXPECT_EQ(skeleton.total, skeleton.bytes.size() + sum);
}

// An archive of two tensors that is written as LibTorch writes it: name, padding, memory.
struct TwoTensors {
  std::string first = std::string(6000, 'a');
  std::string second = std::string(5000, 'b');

  void Save(const WriteBytes& write) const {
    for (const auto& [name, bytes] : {std::pair("x/data/0", &first), {"x/data/1", &second}}) {
      write(name, std::strlen(name));
      write("..", 2);
      write(bytes->data(), bytes->size());
      write("end", 3);
    }
  }
  std::string Whole() const {
    std::string whole;
    Save([&](const void* from, std::size_t bytes) {
      whole.append(static_cast<const char*>(from), bytes);
      return bytes;
    });
    return whole;
  }
};

using Ranges = std::vector<std::pair<std::uint64_t, std::size_t>>;

// What a reader gets that asks for these ranges.
void ExpectReads(const Ranges& ranges) {
  const TwoTensors archive;
  RunTorchRanks(2, [&](int) {
    BroadcastArchive([&](const WriteBytes& write) { archive.Save(write); },
                     [&](const ReadBytes& read, const std::function<std::size_t()>& size) {
                       EXPECT_EQ(size(), archive.Whole().size());
                       for (const auto& [offset, bytes] : ranges) {
                         std::string got(bytes, '?');
                         EXPECT_EQ(read(offset, got.data(), bytes), bytes);
                         EXPECT_EQ(got, archive.Whole().substr(offset, bytes)) << offset;
                       }
                     },
                     0, "test", "archive", CurrentSession());
  });
}

TEST(BroadcastArchiveTest, ReadersMayReadInAnyOrder) {
  constexpr std::size_t kFirst = 10;
  constexpr std::size_t kSecond = kFirst + 6000 + 3 + 10;
  const std::size_t all = TwoTensors().Whole().size();
  ExpectReads({{kFirst, 6000}, {kSecond, 5000}, {0, 10}, {all - 3, 3}});
  ExpectReads({{kSecond, 5000}, {kFirst, 6000}, {kSecond, 5000}});
  ExpectReads({{0, all}});
  ExpectReads({{kFirst + 5990, 40}, {kSecond - 1, 1}, {kSecond, 1}, {0, all}});
  ExpectReads({{kFirst, 6000}});  // and not the other
  ExpectReads({});
}

TEST(BroadcastArchiveTest, ReadsThatCannotBeServedFail) {
  const TwoTensors archive;
  RunTorchRanks(2, [&](int) {
    const auto run = [&](std::uint64_t offset, std::size_t bytes) {
      return ErrorOf(ErrorCode::InvalidArgument, [&] {
        BroadcastArchive([&](const WriteBytes& write) { archive.Save(write); },
                         [&](const ReadBytes& read, const std::function<std::size_t()>&) {
                           std::string to(20000, '?');
                           ASSERT_EQ(read(10, to.data(), 6000), 6000u);
                           EXPECT_EQ(read(offset, to.data(), bytes), 0u);
                           throw std::runtime_error("short read");
                         },
                         0, "test", "archive", CurrentSession());
      });
    };
    EXPECT_THAT(run(10, 6000), HasSubstr("read in an order that is not supported"));
    EXPECT_THAT(run(archive.Whole().size(), 1), HasSubstr("cannot be loaded: short read"));
    EXPECT_THAT(run(1, ~std::size_t{0}), HasSubstr("cannot be loaded: short read"));
  });
}

TEST(BroadcastArchiveTest, WhatChangesWhileItIsSavedIsRefusedOnAllRanks) {
  RunTorchRanks(2, [&](int) {
    int saves = 0;
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          BroadcastArchive(
                              [&](const WriteBytes& write) {
                                TwoTensors archive;
                                if (++saves == 2) archive.first += "more";
                                archive.Save(write);
                              },
                              [](const ReadBytes&, const std::function<std::size_t()>&) {}, 0,
                              "test", "archive", CurrentSession());
                        }),
                HasSubstr("test: cannot be saved: it was changed while it was being saved"));
  });
}

}  // namespace
}  // namespace sirtaki::detail
