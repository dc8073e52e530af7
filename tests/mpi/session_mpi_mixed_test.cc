// RANKS: 2 3
// Sessions in which ranks differ in what their MPI lets threads do.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "frameworks/session.h"
#include "tests/support/mpi_main.h"
#include "tests/support/session_calls.h"

namespace sirtaki::frameworks {
namespace {

using core::OpKind;
using core::Status;
using tests::Vector;

TEST(SessionMpiMixedTest, OneSerializedRankMakesAllSerialized) {
  StartOptions options = tests::SessionOptions();
  const bool serialized = tests::WorldRank() == 1;
  if (serialized) options.config.mpi_threads = core::MpiThreads::kSerialized;
  std::shared_ptr<Session> session;
  const Status started = Session::CreateMpi(options, &session);
  ASSERT_TRUE(started.ok()) << started.ToString();

  const std::string why = serialized
                              ? "used as serialized (mpi_threads): both host lanes are non-blocking"
                              : "; serialized because rank 1 is: both host lanes are non-blocking";
  EXPECT_NE(session->description().find(why), std::string::npos) << session->description();

  const auto ranks = static_cast<float>(tests::WorldSize());
  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 20}) {
    Vector sum(OpKind::kAllReduce, "sum", std::vector<float>(count, 2.0F));
    const Status status = sum.Run(*session);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(sum.values().back(), 2 * ranks);
  }
  const Status ended = session->Shutdown("done");
  EXPECT_TRUE(ended.ok()) << ended.ToString();
}

}  // namespace
}  // namespace sirtaki::frameworks
