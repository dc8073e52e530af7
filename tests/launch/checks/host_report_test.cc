#include "launch/checks/host_report.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace sirtaki::launch {
namespace {

TEST(HostReportTest, ComesBackAsItWasThoughALoginPrintsMore) {
  const HostReport report{
      "0.1.0", "Open MPI 4.1.4", "", "libsirtaki.so.0.1.0", "libmpi.so.40.30.4", {"a.so", "b.so"}};
  EXPECT_EQ(ReadReport("Welcome to h2\n" + ReportText(report) + "bye\n"), report);
  HostReport bad{"0.1.0", "", "No such file or directory", "", "", {}};
  EXPECT_EQ(ReadReport(ReportText(bad)), bad);
  EXPECT_EQ(ReadReport("Welcome to h2\n"), std::nullopt);
  EXPECT_EQ(ReadReport(""), std::nullopt);
}

TEST(HostReportTest, FindsOurLibraryAndWhatIsMissing) {
  const LoadedLibraries libraries = ReadLdd(
      "\tlinux-vdso.so.1 (0x00007ffc)\n"
      "\tlibsirtaki.so.0.1 => /opt/my lib/libsirtaki.so.0.1 (0x00007f12)\n"
      "\tlibmpi.so.40 => not found\n"
      "\tlibc.so.6 => /lib/libc.so.6 (0x00007f13)\n");
  EXPECT_EQ(libraries,
            (LoadedLibraries{"/opt/my lib/libsirtaki.so.0.1", "", {"libmpi.so.40"}, ""}));
  EXPECT_EQ(ReadLdd("\tnot a dynamic executable\n"), LoadedLibraries{});
  const std::string old = "./train: /lib/libc.so.6: version `GLIBC_2.38' not found (by ./train)";
  EXPECT_EQ(ReadLdd(old + "\n\tlibc.so.6 => /lib/libc.so.6 (0x00007f13)\n").error, old);
}

TEST(HostReportTest, FindsTheMpiThatAProgramLoads) {
  const auto mpi_of = [](const std::string& text) { return ReadLdd(text).mpi; };
  EXPECT_EQ(mpi_of("\tlibmpi_cxx.so.40 => /lib/libmpi_cxx.so.40 (0x1)\n"
                   "\tlibmpi.so.40 => /lib/libmpi.so.40 (0x2)\n"),
            "/lib/libmpi.so.40");
  EXPECT_EQ(mpi_of("\tlibmpich.so.12 => /lib/libmpich.so.12 (0x1)\n"), "/lib/libmpich.so.12");
  EXPECT_EQ(mpi_of("\tlibc.so.6 => /lib/libc.so.6 (0x1)\n"), "");
}

TEST(HostReportTest, SaysWhichProgramMayHaveBeenMeant) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::string folder = std::filesystem::temp_directory_path() / "meantXXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::filesystem::current_path(folder);
  for (const char* name : {"u", "text", "train.py"}) std::ofstream(name) << "#!/bin/sh\n";
  std::filesystem::permissions("u", std::filesystem::perms::owner_all);
  EXPECT_EQ(MeantProgram("u"), "; did you mean ./u?");
  EXPECT_EQ(MeantProgram("train.py"), "; did you mean python3 train.py?");
  EXPECT_EQ(MeantProgram("./train.py"), "; did you mean python3 ./train.py?");
  EXPECT_EQ(MeantProgram("./text"), "; chmod +x makes it a program");
  EXPECT_EQ(MeantProgram("./u"), "");
  EXPECT_EQ(MeantProgram("v"), "");
  std::filesystem::current_path(before);
  std::filesystem::remove_all(folder);
}

TEST(HostReportTest, SaysWhetherAProgramCanBeStarted) {
  const auto env = core::EnvironmentView::OfProcess();
  const std::string here = std::filesystem::current_path();
  const auto why = [&](const std::string& program, const std::string& folder) {
    return LookAtHost(folder, "/no/launcher", program, env).program;
  };
  EXPECT_EQ(why("sh", here), "");
  EXPECT_EQ(why("/bin/sh", "/no/such/folder"), "");
  EXPECT_EQ(why("no-such-program", here), "is not on PATH");
  EXPECT_EQ(why("/no/such/program", here), "No such file or directory");
  EXPECT_EQ(why("/etc/passwd", here), "Permission denied");
  EXPECT_EQ(why("/etc", here), "is a folder");
  EXPECT_EQ(why("./train", "/no/such/folder"),
            "folder \"/no/such/folder\": No such file or directory");
  EXPECT_EQ(LookAtHost(here, "/bin/true", "sh", env).launcher, "");
}

}  // namespace
}  // namespace sirtaki::launch
