#include "launch/checks/check_build.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launch/checks/check_machine.h"

namespace sirtaki::launch {
namespace {

TEST(CheckBuildTest, ARowIsTickedWhereSomethingIsThere) {
  const BuildFacts facts{"0.1.0", "Open MPI 4.1.4 (MPI 3.1), /usr/lib/libmpi.so, /usr/bin/mpiexec",
                         "2.11.0+cpu, /opt/torch",
                         "not reachable from LibTorch yet: kernels by nvcc"};
  EXPECT_EQ(BuildText(facts, "/opt/bin/sirtakirun",
                      {{"libsirtaki.so", true, "/opt/lib/libsirtaki.so.0.1.0", ""},
                       {"MPICH", false, "none on PATH", ""},
                       {"open files", true, "256 for a process", "ulimit -n 4096"}}),
            "Sirtaki 0.1.0, /opt/bin/sirtakirun\n\n"
            "Built in:\n"
            "  [X] MPI            Open MPI 4.1.4 (MPI 3.1), /usr/lib/libmpi.so, /usr/bin/mpiexec\n"
            "  [X] LibTorch       2.11.0+cpu, /opt/torch\n"
            "  [ ] CUDA           not reachable from LibTorch yet: kernels by nvcc\n"
            "  [X] shared memory  between ranks of a host\n\n"
            "Found here:\n"
            "  [X] libsirtaki.so  /opt/lib/libsirtaki.so.0.1.0\n"
            "  [ ] MPICH          none on PATH\n"
            "  [X] open files     256 for a process\n\n"
            "To do:\n"
            "  open files: ulimit -n 4096\n");
}

// The cure of the row that has one, "name: cure"; the parts are as on a machine that lacks nothing,
// except for those given.
std::string CureWith(const std::vector<BuildRow>& others,
                     std::string_view cuda = "kernels by nvcc") {
  std::vector<BuildRow> parts = {
      {"MPI: openmpi", true, "Open MPI v4.1.4, /usr/lib/libmpi.so.40", ""},
      {"its LibTorch", true, "2.11.3+cu130, /opt/libtorch_cpu.so", ""},
      {"Open MPI", true, "4.1.4, /usr/bin/mpirun", ""},
      {"MPICH", false, "none on PATH", ""},
      {"Slurm", false, "none on PATH", ""},
      {"CUDA driver", false, "libcuda.so.1 is not found", ""},
      {"NCCL", false, "libnccl.so.2 is not found", ""}};
  for (const BuildRow& other : others) {
    const auto row = std::find_if(parts.begin(), parts.end(),
                                  [&other](const BuildRow& one) { return one.name == other.name; });
    if (row == parts.end()) {
      parts.push_back(other);
    } else {
      *row = other;
    }
  }
  AddCures({"0.1.0", "modules", "2.11.0+cpu, /opt/torch", cuda}, &parts);
  std::string cures;
  for (const BuildRow& row : parts) {
    if (!row.cure.empty()) cures += row.name + ": " + row.cure;
  }
  return cures;
}

TEST(CheckBuildTest, WhatIsNotNeededHasNoCure) {
  EXPECT_EQ(CureWith({}), "");
  EXPECT_EQ(CureWith({}, "off: no CUDA toolkit found"), "");
  EXPECT_NE(BuildText({}, "", {}).find("To do: nothing"), std::string::npos);
}

TEST(CheckBuildTest, WithoutALauncherAnMpiIsToBeInstalled) {
  EXPECT_THAT(CureWith({{"Open MPI", false, "none on PATH", ""}}),
              testing::HasSubstr("apt-get install openmpi-bin"));
  EXPECT_EQ(CureWith({{"Open MPI", false, "none on PATH", ""}, {"Slurm", true, "22.05", ""}}), "");
}

TEST(CheckBuildTest, ALauncherWithoutAModuleOfItsMpiIsNamed) {
  const BuildRow mpich = {"MPICH", true, "5.0.2, /opt/bin/mpiexec", ""};
  EXPECT_THAT(CureWith({mpich}), testing::StartsWith("MPICH: this Sirtaki has no module for it"));
  EXPECT_EQ(CureWith({mpich, {"MPI: mpich", false, "the dynamic linker finds none", ""}}), "");
  EXPECT_EQ(CureWith({mpich, {"MPI: abi", false, "the dynamic linker finds none", ""}}), "");
}

TEST(CheckBuildTest, AnotherSeriesOfLibTorchIsNamed) {
  EXPECT_THAT(CureWith({{"its LibTorch", true, "2.12.0, /opt/libtorch_cpu.so", ""}}),
              testing::HasSubstr("pip install \"torch==2.11.*\""));
}

TEST(CheckBuildTest, GpusNeedKernelsAndNccl) {
  const BuildRow driver = {"CUDA driver", true, "CUDA 13.0, /usr/lib/libcuda.so.1", ""};
  const BuildRow nccl = {"NCCL", true, "2.28.9, /usr/lib/libnccl.so.2", ""};
  EXPECT_THAT(CureWith({driver}), testing::StartsWith("NCCL: "));
  EXPECT_EQ(CureWith({driver, nccl}), "");
  EXPECT_THAT(CureWith({driver, nccl}, "off: no CUDA toolkit found"),
              testing::StartsWith("CUDA driver: "));
}

TEST(CheckBuildTest, ASmallSharedMemoryHasACure) {
  constexpr std::uint64_t kMebibyte = 1U << 20U;
  EXPECT_EQ(SharedMemoryRow(900 * kMebibyte, 1000 * kMebibyte).cure, "");
  EXPECT_EQ(SharedMemoryRow(900 * kMebibyte, 1000 * kMebibyte).text, "900 MiB free of 1000 MiB");
  EXPECT_THAT(SharedMemoryRow(64 * kMebibyte, 64 * kMebibyte).cure,
              testing::HasSubstr("docker run --shm-size 1g"));
  EXPECT_THAT(SharedMemoryRow(kMebibyte, 1000 * kMebibyte).cure,
              testing::HasSubstr("ls -l /dev/shm"));
}

TEST(CheckBuildTest, LimitsThatAreTooLowHaveACure) {
  EXPECT_EQ(OpenFilesRow(1024).cure, "");
  EXPECT_THAT(OpenFilesRow(256).cure, testing::HasSubstr("ulimit -n"));
  EXPECT_EQ(LockedMemoryRow(8U << 20U, false).cure, "");
  EXPECT_EQ(LockedMemoryRow(RLIM_INFINITY, true).cure, "");
  EXPECT_THAT(LockedMemoryRow(8U << 20U, true).cure, testing::HasSubstr("memlock"));
}

TEST(CheckBuildTest, NetworksAreThoseThatOthersReach) {
  const std::vector<Interface> interfaces = {{"lo", 0x7f000001, 0xff000000, true},
                                             {"docker0", 0xac110001, 0xffff0000, false}};
  EXPECT_FALSE(NetworkRow(interfaces).there);
  std::vector<Interface> more = interfaces;
  more.push_back({"eth0", 0x0a000007, 0xffffff00, false});
  EXPECT_EQ(NetworkRow(more).text, "eth0 10.0.0.7/24");
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
