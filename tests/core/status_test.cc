#include "core/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/message.h"

namespace sirtaki::core {
namespace {

TEST(StatusTest, DefaultIsOkAndSaysSo) {
  EXPECT_TRUE(Status().ok());
  EXPECT_EQ(Status::Ok().ToString(), "ok");
}

TEST(StatusTest, TextNamesCodeMessageAndOrigin) {
  const Status status(StatusCode::kMismatch, "all-reduce \"w\": shapes differ", {3, "b", ""});
  EXPECT_EQ(status.ToString(), "mismatch: all-reduce \"w\": shapes differ (from rank 3 on host b)");
}

TEST(StatusTest, TextLeavesOutWhatIsUnknown) {
  EXPECT_EQ(Status(StatusCode::kTimedOut, "").ToString(), "timed out");
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {7, "", ""}).ToString(),
            "peer lost: no answer (from rank 7)");
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {-1, "b", ""}).ToString(),
            "peer lost: no answer (from host b)");
}

TEST(StatusTest, TextNamesTheTensorOnce) {
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {1, "a", "\"w\""}).ToString(),
            "peer lost: no answer (from rank 1 on host a, tensor \"w\")");
  EXPECT_EQ(Status(StatusCode::kPeerLost, "\"w\" waits", {-1, "", "\"w\""}).ToString(),
            "peer lost: \"w\" waits");
}

TEST(StatusTest, CodesHaveDifferentNames) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kUnsupported); ++code) {
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), 12U);
  EXPECT_EQ(names.count("unknown error"), 0U);
}

TEST(CauseTest, BecomesAStatusWithItsOrigin) {
  const Cause cause{StatusCode::kAborted, "nan in loss", 2, "node1", "\"w\"", 1234};
  EXPECT_EQ(cause.ToStatus(), Status(StatusCode::kAborted, "nan in loss", {2, "node1", "\"w\""}));
}

TEST(CauseTest, IsNeverOk) {
  Cause cause;
  cause.code = StatusCode::kOk;
  EXPECT_FALSE(cause.ToStatus().ok());
}

}  // namespace
}  // namespace sirtaki::core
