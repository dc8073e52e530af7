#include "core/base/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/protocol/message.h"

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
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {1, "a", "w"}).ToString(),
            "peer lost: no answer (from rank 1 on host a, tensor \"w\")");
  EXPECT_EQ(Status(StatusCode::kPeerLost, "\"w\" waits", {-1, "", "w"}).ToString(),
            "peer lost: \"w\" waits");
  // Its letters alone do not name it.
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {-1, "", "n"}).ToString(),
            "peer lost: no answer (tensor \"n\")");
  EXPECT_EQ(Status(StatusCode::kTimedOut, "unnamed call #7 waits", {-1, "", "unnamed call #7"})
                .ToString(),
            "timed out: unnamed call #7 waits");
}

TEST(StatusTest, TextEscapesTheTensor) {
  EXPECT_EQ(Status(StatusCode::kPeerLost, "no answer", {-1, "", "a\nb"}).ToString(),
            "peer lost: no answer (tensor \"a\\nb\")");
}

TEST(StatusTest, TextNamesARankWithoutAHostOnce) {
  const auto text = [](const std::string& message, int rank, const std::string& host = {}) {
    return Status(StatusCode::kShutDown, message, {rank, host, ""}).ToString();
  };
  EXPECT_EQ(text("rank 1 has shut down", 1), "shut down: rank 1 has shut down");
  EXPECT_EQ(text("ranks 1-3 have shut down", 1), "shut down: ranks 1-3 have shut down");
  EXPECT_EQ(text("rank 12 has shut down", 1), "shut down: rank 12 has shut down (from rank 1)");
  EXPECT_EQ(text("rank 1 has shut down", 1, "b"),
            "shut down: rank 1 has shut down (from rank 1 on host b)");
}

TEST(StatusTest, CodesHaveDifferentNames) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(kLastStatusCode); ++code) {
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), 12U);
  EXPECT_EQ(names.count("unknown error"), 0U);
}

TEST(CauseTest, BecomesAStatusWithItsOrigin) {
  const Cause cause{StatusCode::kAborted, "nan in loss", 2, "node1", "w", 1234};
  EXPECT_EQ(cause.ToStatus(), Status(StatusCode::kAborted, "nan in loss", {2, "node1", "w"}));
}

TEST(CauseTest, IsNeverOk) {
  Cause cause;
  cause.code = StatusCode::kOk;
  EXPECT_FALSE(cause.ToStatus().ok());
}

}  // namespace
}  // namespace sirtaki::core
