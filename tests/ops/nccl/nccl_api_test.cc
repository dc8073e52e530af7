#include "ops/nccl/nccl_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;

TEST(NcclApiTest, VersionsAreReadable) {
  EXPECT_EQ(VersionText(22809), "2.28.9");
  EXPECT_EQ(VersionText(21805), "2.18.5");
  EXPECT_EQ(VersionText(2708), "2.7.8");  // as they were counted before 2.9
}

TEST(NcclApiTest, AVersionThatDoesNotDoIsNamedWithItsPath) {
  EXPECT_TRUE(CheckVersion(kDeclaredVersion, "/a/libnccl.so.2").ok());
  EXPECT_TRUE(CheckVersion(kOldestVersion, "/a/libnccl.so.2").ok());
  EXPECT_TRUE(CheckVersion(23001, "/a/libnccl.so.2").ok());
  for (const int loaded : {2708, 21701, 30000}) {
    const Status status = CheckVersion(loaded, "/opt/libnccl.so.2");
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr("NCCL " + VersionText(loaded)));
    EXPECT_THAT(status.message(), HasSubstr("/opt/libnccl.so.2"));
    EXPECT_THAT(status.message(), HasSubstr("this build knows 2.28.9"));
  }
}

// What NCCL reads of it depends on the first three fields and on where `blocking` lies.
TEST(NcclApiTest, TheConfigurationIsThatOfVersion214) {
  EXPECT_EQ(offsetof(Config, magic), 8u);
  EXPECT_EQ(offsetof(Config, version), 12u);
  EXPECT_EQ(offsetof(Config, blocking), 16u);
  const Config config;
  EXPECT_EQ(config.size, sizeof(Config));
  EXPECT_EQ(config.magic, 0xcafebeefu);
  EXPECT_EQ(config.blocking, 0);
  EXPECT_EQ(sizeof(UniqueId), 128u);
}

TEST(NcclApiTest, OpensTheRealOne) {
  Library library;
  const Status status = Load(&library);
  if (!status.ok()) GTEST_SKIP() << status.message();
  EXPECT_GE(library.version, kOldestVersion);
  EXPECT_THAT(library.path, HasSubstr("libnccl.so"));
  if (library.version >= 22700) {  // the first that has all
    EXPECT_NE(library.api.MemAlloc, nullptr);
    EXPECT_NE(library.api.MemFree, nullptr);
    EXPECT_NE(library.api.CommRegister, nullptr);
    EXPECT_NE(library.api.CommDeregister, nullptr);
    EXPECT_NE(library.api.CommWindowRegister, nullptr);
    EXPECT_NE(library.api.CommWindowDeregister, nullptr);
  }
  EXPECT_THAT(library.api.GetErrorString(Result::kInvalidUsage), HasSubstr("invalid usage"));
  EXPECT_THAT(Check(library.api, Result::kSystemError, "ncclTest", nullptr).message(),
              HasSubstr("ncclTest: unhandled system error"));
}

}  // namespace
}  // namespace sirtaki::ops::nccl
