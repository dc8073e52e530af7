#include "launch/checks/check_build.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace sirtaki::launch {
namespace {

TEST(CheckBuildTest, ARowIsTickedWhereSomethingIsThere) {
  const BuildFacts facts{"0.1.0", "Open MPI 4.1.4 (MPI 3.1), /usr/lib/libmpi.so, /usr/bin/mpiexec",
                         "2.11.0+cpu, /opt/torch",
                         "not reachable from LibTorch yet: kernels by nvcc"};
  EXPECT_EQ(BuildText(facts, "/opt/bin/sirtakirun",
                      {{"libsirtaki.so", true, "/opt/lib/libsirtaki.so.0.1.0"},
                       {"MPICH", false, "none on PATH"}}),
            "Sirtaki 0.1.0, /opt/bin/sirtakirun\n\n"
            "Built in:\n"
            "  [X] MPI            Open MPI 4.1.4 (MPI 3.1), /usr/lib/libmpi.so, /usr/bin/mpiexec\n"
            "  [X] LibTorch       2.11.0+cpu, /opt/torch\n"
            "  [ ] CUDA           not reachable from LibTorch yet: kernels by nvcc\n"
            "  [X] shared memory  between ranks of a host\n\n"
            "Found here:\n"
            "  [X] libsirtaki.so  /opt/lib/libsirtaki.so.0.1.0\n"
            "  [ ] MPICH          none on PATH\n");
}

TEST(CheckBuildTest, TheBuildOfLibTorchStandsInItsVersionFile) {
  EXPECT_EQ(TorchVersionIn("debug = False\n__version__ = '2.11.0+cu130'\n"), "2.11.0+cu130");
  EXPECT_EQ(TorchVersionIn("version = 3\n"), "");
  EXPECT_EQ(TorchVersionIn(""), "");
}

TEST(CheckBuildTest, WhatIsNotThereIsNotTicked) {
  const std::vector<BuildRow> rows =
      FindParts("/no/bin/sirtakirun", core::EnvironmentView{{"PATH", "/no/bin"}});
  const auto row = [&rows](const std::string& name) {
    return *std::find_if(rows.begin(), rows.end(),
                         [&name](const BuildRow& one) { return one.name == name; });
  };
  EXPECT_FALSE(row("libsirtaki.so").there);
  EXPECT_FALSE(row("ssh").there);
  for (const char* name : {"Open MPI", "MPICH", "Slurm"}) {
    EXPECT_FALSE(row(name).there) << name;
    EXPECT_EQ(row(name).text, "none on PATH") << name;
  }
}

}  // namespace
}  // namespace sirtaki::launch
