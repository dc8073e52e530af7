#include "tcp/mesh.h"

#include <gtest/gtest.h>

#include <boost/asio/ip/address_v4.hpp>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tcp/door.h"
#include "tests/tcp/lines.h"

namespace sirtaki::tcp {
namespace {

using asio::ip::tcp;
using core::Clock;

const std::string kMeshSecret(32, 'm');
constexpr int kMeshSize = 3;

Place MeshPlaceOf(int rank) { return {rank, kMeshSize, "127.0.0.1", 0, kMeshSecret}; }

// Rank 0 lets the first calls down, as a host that is held up does, and is reached later.
TEST(TcpMeshTest, ARankThatIsReachedAtLastIsNotTheOneThatIsMissing) {
  Tasks tasks;
  tcp::acceptor first(tasks.io(), {asio::ip::address_v4::loopback(), 0});
  const tcp::endpoint end = first.local_endpoint();
  const auto deadline = Clock::now() + std::chrono::seconds(3);
  core::Status status;
  std::thread rank1([&] {
    Tasks own_tasks;
    Door door(own_tasks, 1, kMeshSize);
    ASSERT_TRUE(door.Open("127.0.0.1", 0).ok());
    Mesh mesh(own_tasks, door, MeshPlaceOf(1), tests::HostsOf(kMeshSize), kMeshSecret, deadline);
    status = mesh.Connect({end, end, end});
  });
  for (int i = 0; i < 3; ++i) first.accept().close();
  first.close();
  Door door(tasks, 0, kMeshSize);
  std::vector<Socket> lines;
  EXPECT_TRUE(door.Open("127.0.0.1", end.port()).ok());
  door.Receive({kMeshSecret, deadline, [](const Caller&) { return ""; },
                [&](const Caller&, Socket line) { lines.push_back(std::move(line)); },
                [](const std::string&) {}});
  tasks.Drive(deadline, [&] { return lines.size() == 3; });
  EXPECT_EQ(lines.size(), 3);
  rank1.join();
  // Rank 2 has never called.
  EXPECT_EQ(status.code(), core::StatusCode::kTimedOut) << status.ToString();
  EXPECT_EQ(status.message(),
            "rank 1 on host host1 has no connection with rank 2 within start_timeout");
  EXPECT_EQ(status.origin().rank, 2);
}

}  // namespace
}  // namespace sirtaki::tcp
