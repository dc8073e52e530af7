#include "launch/hosts/launcher.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

std::string Recognized(std::string_view text) {
  const auto launcher = RecognizeLauncher("/bin/x", text);
  return launcher ? launcher->ToString() : "none";
}

TEST(LauncherTest, RecognizesWhatEachPrints) {
  EXPECT_EQ(Recognized("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org\n"),
            "Open MPI 4.1.4 (/bin/x)");
  EXPECT_EQ(Recognized("mpiexec (OpenRTE) 4.0.3\n"), "Open MPI 4.0.3 (/bin/x)");
  EXPECT_EQ(Recognized("mpirun (Open MPI) 5.0.11\n"), "Open MPI 5.0.11 (/bin/x)");
  EXPECT_EQ(
      Recognized("HYDRA build details:\n    Version:                                 4.0.2\n"
                 "    Release Date:                            Thu Apr  7 12:34:45 CDT 2022\n"),
      "MPICH 4.0.2 (/bin/x)");
  EXPECT_EQ(
      Recognized(
          "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)\n"
          "Copyright 2003-2026, Intel Corporation.\n"),
      "Intel MPI 2021.19.0 (/bin/x)");
  EXPECT_EQ(Recognized("slurm-wlm 22.05.8\n"), "Slurm 22.05.8 (/bin/x)");
  EXPECT_EQ(Recognized("slurm 23.11.1\n"), "Slurm 23.11.1 (/bin/x)");
  EXPECT_EQ(Recognized("sirtakirun 0.1.0\n"), "sirtakirun 0.1.0 (/bin/x)");
}

TEST(LauncherTest, TellsTheVersionsOfOpenMpiApart) {
  EXPECT_EQ(RecognizeLauncher("x", "mpirun (Open MPI) 4.1.4")->kind, LauncherKind::kOpenMpi4);
  EXPECT_EQ(RecognizeLauncher("x", "mpirun (Open MPI) 5.0.11")->kind, LauncherKind::kOpenMpi5);
  EXPECT_EQ(RecognizeLauncher("x", "mpirun (Open MPI) 6.0")->kind, LauncherKind::kOpenMpi5);
}

TEST(LauncherTest, KnowsNothingElse) {
  EXPECT_EQ(Recognized(""), "none");
  EXPECT_EQ(Recognized("mpirun (Open MPI) 3.1.6"), "none");
  EXPECT_EQ(Recognized("my slurm 3"), "none");
}

}  // namespace
}  // namespace sirtaki::launch
