// Which ranks are on one GPU.
#include "gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace examples {
namespace {

// The place of the GPU of this number in a process with these variables; an empty one is not set.
// CUDA is not loaded here, so places go by the numbers.
std::string Place(int number, const char* visible, const char* host_id = "") {
  const auto set = [](const char* name, const char* value) {
    *value != '\0' ? setenv(name, value, 1) : unsetenv(name);
  };
  set("CUDA_VISIBLE_DEVICES", visible);
  set("NCCL_HOSTID", host_id);
  const std::string place = place_of_gpu(number);
  set("CUDA_VISIBLE_DEVICES", "");
  set("NCCL_HOSTID", "");
  return place;
}

TEST(GpusTest, RanksThatSeeOneGpuEachDoNotShareIt) {
  EXPECT_EQ(who_shares_a_gpu({Place(0, "0"), Place(0, "1"), Place(0, "GPU-2f")}), "");
  EXPECT_EQ(who_shares_a_gpu({Place(0, "3,1"), Place(1, "3,1"), Place(0, ""), Place(2, "")}), "");
}

TEST(GpusTest, ARankOnTheGpuOfAnotherIsFound) {
  EXPECT_EQ(who_shares_a_gpu({Place(0, ""), Place(1, ""), Place(0, "")}),
            "ranks 0 and 2 would share a GPU");
  EXPECT_EQ(who_shares_a_gpu({Place(0, "0"), Place(1, "2,0")}), "ranks 0 and 1 would share a GPU");
  EXPECT_EQ(who_shares_a_gpu({Place(1, ""), Place(0, "1")}), "ranks 0 and 1 would share a GPU");
}

TEST(GpusTest, RanksThatSayToBeOfDifferentHostsMayShare) {
  EXPECT_EQ(who_shares_a_gpu({Place(0, "", "rank0"), Place(0, "", "rank1")}), "");
}

}  // namespace
}  // namespace examples
