#include "ops/base/dynamic_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace sirtaki::ops {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

TEST(DynamicLibraryTest, TakesTheCopyThatIsInTheProcess) {
  DynamicLibrary library;
  // The name that it would be opened by does not exist.
  const core::Status status =
      DynamicLibrary::Open({"libstdc++.so", {}, {"libsirtaki_none.so"}}, &library);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_THAT(library.path(), HasSubstr("libstdc++.so.6"));
  EXPECT_NE(library.Find("__cxa_throw"), nullptr);
}

TEST(DynamicLibraryTest, OpensByName) {
  DynamicLibrary library;
  ASSERT_TRUE(DynamicLibrary::Open({"libnothing", {}, {"libm.so.6"}}, &library).ok());
  EXPECT_THAT(library.path(), EndsWith("libm.so.6"));
  double (*cosine)(double) = nullptr;
  ASSERT_TRUE(library.Take("cos", &cosine));
  EXPECT_EQ(cosine(0.0), 1.0);
  int (*none)() = [] { return 1; };
  EXPECT_FALSE(library.Take("sirtaki_has_no_such_function", &none));
  EXPECT_EQ(none, nullptr);
}

TEST(DynamicLibraryTest, SaysWhatItLookedAt) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / "sirtaki_dynamic_library_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "libsirtaki_broken.so.1") << "no library";
  DynamicLibrary library;
  const core::Status status = DynamicLibrary::Open(
      {"libsirtaki_broken", {folder, "/nowhere"}, {"libsirtaki_none.so"}}, &library);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr((folder / "libsirtaki_broken.so.1").string()));
  EXPECT_THAT(status.message(), HasSubstr("libsirtaki_none.so"));
  EXPECT_EQ(library.Find("anything"), nullptr);
  std::filesystem::remove_all(folder);
}

TEST(DynamicLibraryTest, WithoutLibTorchThereAreNoFoldersBesideIt) {
  EXPECT_TRUE(FoldersBesideLibTorch().empty());
}

}  // namespace
}  // namespace sirtaki::ops
