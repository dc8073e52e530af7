#include "launch/plan/find_launcher.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace sirtaki::launch {
namespace {

// A folder that is removed with it.
class Folder {
 public:
  Folder() : path_(::testing::TempDir() + "find_launcher_test.XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string Add(const std::string& name, const std::string& script) const {
    std::string path = path_ + "/" + name;
    std::ofstream(path) << "#!/bin/sh\n" << script << "\n";
    chmod(path.c_str(), 0755);
    return path;
  }

 private:
  std::string path_;
};

TEST(FindLauncherTest, EveryFolderOfThePathIsLookedIn) {
  const Folder folder;
  const std::string program = folder.Add("only-here", "true");
  for (const std::string& path :
       {folder.path(), folder.path() + ":/usr/bin", "/usr/bin:" + folder.path(),
        "/no/such/folder:" + folder.path() + ":/bin"}) {
    EXPECT_EQ(FindOnPath("only-here", {{"PATH", path}}), program) << path;
  }
  EXPECT_EQ(FindOnPath("only-here", {{"PATH", "/usr/bin:/bin"}}), "");
  EXPECT_EQ(FindOnPath("only-here", {}), "");
  EXPECT_NE(FindOnPath("sh", {}), "");
}

TEST(FindLauncherTest, TheFirstOfItsKindIsTaken) {
  const Folder slurm;
  const Folder open_mpi;
  slurm.Add("mpirun", "echo slurm 23.11.1");
  const std::string path = open_mpi.Add("mpirun", "echo 'mpirun (Open MPI) 4.1.4'");
  Launcher launcher;
  ASSERT_TRUE(FindLauncher("auto", {{"PATH", open_mpi.path()}}, {}, &launcher).ok());
  EXPECT_EQ(launcher.ToString(), "Open MPI 4.1.4 (" + path + ")");
  const core::Status status = FindLauncher("openmpi", {{"PATH", slurm.path()}}, {}, &launcher);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("mpirun: is Slurm 23.11.1 ("), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("mpiexec: not on PATH"), std::string::npos) << status.message();
}

// The launcher of another MPI stands first on PATH.
TEST(FindLauncherTest, TheOneOfTheMpiOfTheBuildIsPreferred) {
  const Folder first;
  const Folder own;
  const std::string open_mpi = first.Add("mpirun", "echo 'mpirun (Open MPI) 4.1.4'");
  const std::string mpich =
      own.Add("mpiexec", "printf 'HYDRA build details:\\n    Version:   5.0.2\\n'");
  const std::string srun = own.Add("srun", "echo slurm 23.11.1");
  const auto found = [](const std::string& path, const char* mpi, const std::string& mpiexec,
                        const char* wanted = "auto") {
    Launcher launcher;
    const core::Status status = FindLauncher(wanted, {{"PATH", path}, {"SLURM_JOB_ID", "7"}},
                                             {"", mpi, "", "", mpiexec}, &launcher);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return launcher.path;
  };
  const std::string both = first.path() + ":" + own.path();
  EXPECT_EQ(found(first.path(), "MPICH 5.0.1 (MPI 4.1), …", mpich), mpich);
  EXPECT_EQ(found(both, "MPICH 5.0.1 (MPI 4.1), …", "/no/such/mpiexec"), mpich);
  EXPECT_EQ(found(both, "Open MPI 4.0.3 (MPI 3.1), …", mpich), open_mpi);
  EXPECT_EQ(found(first.path(), "Open MPI 5.0.11 (MPI 3.1), …", "/no/such/mpiexec"), open_mpi);
  EXPECT_EQ(found(first.path(), "MPICH 5.0.1 (MPI 4.1), …", mpich, "openmpi"), open_mpi);
  EXPECT_EQ(found(first.path(), "MPICH 5.0.1 (MPI 4.1), …", mpich, open_mpi.c_str()), open_mpi);
  std::filesystem::remove(open_mpi);
  std::filesystem::remove(mpich);
  EXPECT_EQ(found(both, "MPICH 5.0.1 (MPI 4.1), …", mpich), srun);
  EXPECT_EQ(found(both, "off: SIRTAKI_MPI=OFF", ""), srun);
}

TEST(FindLauncherTest, SirtakirunStartsRanksItselfWhereThereIsNoLauncherAtAll) {
  const Folder empty;
  const core::EnvironmentView env = {{"PATH", empty.path()}};
  const BuildFacts build = {"0.1.0", "Open MPI 4.1.4", "", "", "/no/such/mpiexec"};
  Launcher launcher;
  ASSERT_TRUE(FindLauncher("auto", env, build, &launcher).ok());
  EXPECT_EQ(launcher.kind, LauncherKind::kOwn);
  EXPECT_EQ(launcher.ShortName(), "sirtakirun 0.1.0");
  EXPECT_EQ(launcher.why,
            "as no launcher of an MPI was found (mpirun: not on PATH; mpiexec: not on PATH; "
            "mpiexec.hydra: not on PATH; /no/such/mpiexec: is not there)");
  for (const char* wanted : {"mpi", "openmpi", "mpich", "srun", "/no/such/mpiexec"}) {
    EXPECT_EQ(FindLauncher(wanted, env, build, &launcher).code(), core::StatusCode::kUnsupported)
        << wanted;
  }
}

TEST(FindLauncherTest, SirtakirunStartsRanksItselfWhereItIsAsked) {
  const Folder folder;
  folder.Add("mpirun", "echo 'mpirun (Open MPI) 4.1.4'");
  Launcher launcher;
  ASSERT_TRUE(FindLauncher("sirtakirun", {{"PATH", folder.path()}}, {"0.1.0"}, &launcher).ok());
  EXPECT_EQ(launcher.kind, LauncherKind::kOwn);
}

// Ranks would talk over something else than when it works.
TEST(FindLauncherTest, ALauncherThatDoesNotWorkIsAnErrorAllTheSame) {
  const Folder folder;
  folder.Add("mpirun", "echo 'mpirun (Open MPI) 3.1.6'");
  Launcher launcher;
  const core::Status status = FindLauncher("auto", {{"PATH", folder.path()}}, {}, &launcher);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("--no-mpi starts the ranks without an MPI"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace sirtaki::launch
