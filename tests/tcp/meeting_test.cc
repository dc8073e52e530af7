#include "tcp/meeting.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tcp/door.h"
#include "tests/support/forked_child.h"
#include "tests/support/rank_threads.h"
#include "tests/tcp/lines.h"

namespace sirtaki::tcp {
namespace {

using core::Clock;
using core::Status;
using core::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using tests::RankThreads;

const std::string kSecret(32, 's');

// A socket that listens at a port of the loopback that was free.
core::Descriptor Listening(int* port) {
  core::Descriptor fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(fd.get(), 8), 0);
  EXPECT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  *port = ntohs(address.sin_port);
  return fd;
}

int FreePort() {
  int port = 0;
  Listening(&port);
  return port;
}

core::Descriptor ConnectedTo(int port) {
  core::Descriptor fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const auto deadline = Clock::now() + seconds(30);
  while (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    if (Clock::now() > deadline) return {};
    std::this_thread::sleep_for(milliseconds(1));
  }
  return fd;
}

class MeetingTest : public ::testing::Test {
 protected:
  Place PlaceOf(int rank, int size) const { return {rank, size, "127.0.0.1", port_, kSecret}; }
  static core::TimePoint Within(core::Duration time) { return Clock::now() + time; }

  int port_ = FreePort();
};

// Rank 0 has one more connection with each rank than they have with each other.
TEST_F(MeetingTest, Rank0NeedsMoreOpenFilesThanTheOthers) {
  const auto needs_more_than = [&](int rank, rlim_t files) {
    return tests::InChild([&] {
      const rlimit limit{files, files};
      if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
      std::unique_ptr<Meeting> meeting;
      const Status status = Meeting::Begin(PlaceOf(rank, 10), Clock::now(), &meeting);
      return status.message().find(" open files, and may have ") != std::string::npos ? 1 : 0;
    });
  };
  EXPECT_EQ(needs_more_than(1, 256 + 30), 0);
  EXPECT_EQ(needs_more_than(0, 256 + 39), 1);
  EXPECT_EQ(needs_more_than(0, 256 + 40), 0);
}

void ExpectText(const Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status.ToString();
  EXPECT_NE(status.message().find(text), std::string::npos) << status.ToString();
}

TEST_F(MeetingTest, RanksMeetTellEachOtherAndConnectEachWithEach) {
  constexpr int kSize = 4;
  RankThreads::Run(kSize, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    Status status = Meeting::Begin(PlaceOf(rank, kSize), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{5}, std::size_t{300'000}}) {
      const std::string mine(bytes, static_cast<char>('a' + rank));
      status = meeting->Exchange(mine, Within(seconds(60)), &all);
      ASSERT_TRUE(status.ok()) << status.ToString();
      for (int other = 0; other < kSize; ++other) {
        EXPECT_EQ(all[static_cast<std::size_t>(other)],
                  std::string(bytes, static_cast<char>('a' + other)));
      }
    }
    std::vector<Lines> lines;
    status = meeting->Connect(tests::HostsOf(kSize), Within(seconds(60)), &lines);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(lines.size(), kSize);
    // Both ends are each other's, line by line.
    for (int other = 0; other < kSize; ++other) {
      Lines& there = lines[static_cast<std::size_t>(other)];
      int line = 0;
      for (const Line* fd : {&there.control, &there.urgent, &there.bulk}) {
        ASSERT_EQ(fd->valid(), other != rank);
        const char said = static_cast<char>(rank * 3 + line++);
        if (fd->valid()) {
          ASSERT_EQ(send(fd->get(), &said, 1, 0), 1);
        }
      }
      line = 0;
      for (const Line* fd : {&there.control, &there.urgent, &there.bulk}) {
        if (!fd->valid()) continue;
        pollfd ready{fd->get(), POLLIN, 0};
        ASSERT_EQ(poll(&ready, 1, 60'000), 1);
        char heard = 0;
        ASSERT_EQ(recv(fd->get(), &heard, 1, 0), 1);
        EXPECT_EQ(heard, static_cast<char>(other * 3 + line++));
      }
    }
    ASSERT_TRUE(meeting->Exchange("over", Within(seconds(60)), &all).ok());
  });
}

TEST_F(MeetingTest, ARankThatComesBeforeRankZeroWaitsForIt) {
  RankThreads::Run(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(milliseconds(300));
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 2), Within(seconds(60)), &meeting);
    EXPECT_TRUE(status.ok()) << status.ToString();
  });
}

TEST_F(MeetingTest, RanksThatDoNotComeAreNamedAndTheOthersLearnIt) {
  RankThreads::Run(2, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    Status status = Meeting::Begin(PlaceOf(rank, 4), Within(seconds(rank == 0 ? 1 : 60)), &meeting);
    const std::string text =
        "ranks 2, 3 did not come to rank 0 (127.0.0.1:" + std::to_string(port_) +
        ") within start_timeout";
    ExpectText(status, rank == 0 ? StatusCode::kTimedOut : StatusCode::kAborted, text);
  });
}

TEST_F(MeetingTest, WithoutRankZeroTheOthersSayWhatTheyTried) {
  std::unique_ptr<Meeting> meeting;
  ExpectText(Meeting::Begin(PlaceOf(1, 2), Within(milliseconds(200)), &meeting),
             StatusCode::kTimedOut,
             "rank 1 did not meet the others at rank 0 within start_timeout: 127.0.0.1:" +
                 std::to_string(port_) + ": Connection refused");
  Place place = PlaceOf(1, 2);
  place.address = "no-such-host.invalid";
  ExpectText(Meeting::Begin(place, Within(milliseconds(500)), &meeting), StatusCode::kTimedOut,
             "MASTER_ADDR=\"no-such-host.invalid\" does not resolve: ");
  ExpectText(Meeting::Begin(place, Within(milliseconds(500)), &meeting), StatusCode::kTimedOut,
             "; give rank 0's address, or a name that this host knows");
}

TEST_F(MeetingTest, AnotherSecretIsRefusedByBoth) {
  RankThreads::Run(2, [&](int rank) {
    Place place = PlaceOf(rank, 2);
    if (rank == 1) place.secret = std::string(32, 'x');
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(place, Within(seconds(rank == 0 ? 2 : 60)), &meeting);
    if (rank == 0)
      return ExpectText(status, StatusCode::kTimedOut, "rank 1 did not come to rank 0");
    ExpectText(status, StatusCode::kProtocol,
               "it does not know this job's secret (SIRTAKI_SECRET); give all ranks the same");
  });
}

TEST_F(MeetingTest, ARankThatIsThereTwiceAndAnotherSizeAreErrorsOfAll) {
  const struct {
    Place second;
    const char* text;
  } cases[] = {
      {PlaceOf(1, 3), "two processes say that they are rank 1: RANK has to differ"},
      {PlaceOf(2, 4), "rank 2 is one of 4, rank 0 one of 3: WORLD_SIZE has to be the same"}};
  for (const auto& one : cases) {
    RankThreads::Run(3, [&](int thread) {
      Place place = PlaceOf(thread, 3);
      if (thread == 2) place = one.second;
      std::unique_ptr<Meeting> meeting;
      const Status status = Meeting::Begin(place, Within(seconds(thread == 0 ? 60 : 3)), &meeting);
      if (thread == 0) return ExpectText(status, StatusCode::kMismatch, one.text);
      // One that comes when all is over finds nobody. Of two that are the same the first is welcome.
      if (status.code() == StatusCode::kTimedOut) return;
      const bool was_welcome = status.code() == StatusCode::kAborted;
      ExpectText(status, was_welcome ? StatusCode::kAborted : StatusCode::kMismatch, one.text);
    });
  }
}

TEST_F(MeetingTest, StrangersKeepNobodyOut) {
  RankThreads::Run(3, [&](int thread) {
    if (thread == 2) {
      // Some are silent, some say what no rank says, some go at once.
      std::vector<core::Descriptor> strangers;
      for (int i = 0; i < 90; ++i) {
        core::Descriptor stranger = ConnectedTo(port_);
        if (!stranger.valid()) return;
        const std::string text =
            "GET / HTTP/1.1\r\nHost: node1\r\nAccept: everything that there is\r\n";
        if (i % 3 == 0) send(stranger.get(), text.data(), text.size(), MSG_NOSIGNAL);
        if (i % 3 != 1) strangers.push_back(std::move(stranger));
      }
      std::unique_ptr<Meeting> meeting;
      const Status status = Meeting::Begin(PlaceOf(1, 3), Within(seconds(60)), &meeting);
      ASSERT_TRUE(status.ok()) << status.ToString();
      std::vector<std::string> all;
      EXPECT_TRUE(meeting->Exchange("", Within(seconds(60)), &all).ok());
      return;
    }
    if (thread == 1) std::this_thread::sleep_for(milliseconds(200));
    std::unique_ptr<Meeting> meeting;
    const Status status =
        Meeting::Begin(PlaceOf(thread == 0 ? 0 : 2, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    EXPECT_TRUE(meeting->Exchange("", Within(seconds(60)), &all).ok());
  });
}

// The same host by its other names; in Debian 127.0.1.1 is that of its own name.
TEST_F(MeetingTest, RanksOfOneHostMeetAtEachAddressOfItsLoopback) {
  for (const char* address : {"localhost", "127.0.1.1", "::1"}) {
    RankThreads::Run(3, [&](int rank) {
      Place place = PlaceOf(rank, 3);
      place.address = address;
      std::unique_ptr<Meeting> meeting;
      Status status = Meeting::Begin(place, Within(seconds(60)), &meeting);
      ASSERT_TRUE(status.ok()) << address << ": " << status.ToString();
      std::vector<Lines> lines;
      status = meeting->Connect(tests::HostsOf(3), Within(seconds(60)), &lines);
      EXPECT_TRUE(status.ok()) << address << ": " << status.ToString();
    });
  }
}

// Attends a meeting of three that the others do not come to in time: as of a process that ends.
void AttendInVain(const Place& place) {
  std::unique_ptr<Meeting> meeting;
  const Status status = Meeting::Begin(place, Clock::now() + milliseconds(300), &meeting);
  EXPECT_EQ(status.code(), StatusCode::kTimedOut) << status.ToString();
}

TEST_F(MeetingTest, ARankThatEndsAndIsStartedAgainIsWelcome) {
  std::promise<void> is_gone;
  RankThreads::Run(3, [&](int rank) {
    if (rank == 1) {
      AttendInVain(PlaceOf(1, 3));
      is_gone.set_value();
    }
    if (rank == 2) is_gone.get_future().wait();  // else the meeting is over before
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    EXPECT_TRUE(meeting->Exchange("", Within(seconds(60)), &all).ok());
  });
}

TEST_F(MeetingTest, AMeetingWaitsForARankThatEndedBeforeTheLastCame) {
  std::promise<void> is_gone;
  std::promise<void> has_come;
  RankThreads::Run(3, [&](int rank) {
    if (rank == 1) {
      AttendInVain(PlaceOf(1, 3));
      is_gone.set_value();
      has_come.get_future().wait();
    }
    if (rank == 2) {
      is_gone.get_future().wait();
      AttendInVain(PlaceOf(2, 3));  // all have come now, and one has ended
      has_come.set_value();
    }
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    EXPECT_TRUE(meeting->Exchange("", Within(seconds(60)), &all).ok());
  });
}

TEST_F(MeetingTest, RankZeroMayBeKilledAndStartedAgainUntilAllHaveMet) {
  std::promise<void> was_killed;
  RankThreads::Run(3, [&](int rank) {
    if (rank == 0) {
      // This rank 0 is killed: the system closes its connections, and it says nothing.
      Tasks tasks;
      Door door(tasks, 0, 8);
      ASSERT_TRUE(door.Open("127.0.0.1", port_).ok());
      Socket met;
      door.Receive({kSecret, Within(seconds(60)), [](const Caller&) { return ""; },
                    [&met](const Caller&, Socket socket) { met = std::move(socket); },
                    [](const std::string&) {}});
      tasks.Drive(Within(seconds(60)), [&met] { return met != nullptr; });
      EXPECT_NE(met, nullptr);
      door.Close();
      met.reset();
      was_killed.set_value();
    }
    if (rank == 2) was_killed.get_future().wait();
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    EXPECT_TRUE(meeting->Exchange("", Within(seconds(60)), &all).ok());
  });
}

TEST_F(MeetingTest, ARankThatCannotConnectIsToldOfOnAllRanks) {
  RankThreads::Run(3, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<Lines> lines;
    // Rank 2 has too little time.
    status = meeting->Connect(tests::HostsOf(3), Within(rank == 2 ? milliseconds(-1) : seconds(4)),
                              &lines);
    EXPECT_FALSE(status.ok());
    EXPECT_FALSE(status.message().empty());
  });
}

// Somebody listens at the port, and never says a word.
TEST_F(MeetingTest, AListenerThatIsSilentIsLeftWithTheCure) {
  const core::Descriptor silent = Listening(&port_);
  std::unique_ptr<Meeting> meeting;
  ExpectText(Meeting::Begin(PlaceOf(1, 2), Within(milliseconds(300)), &meeting),
             StatusCode::kTimedOut,
             "127.0.0.1:" + std::to_string(port_) +
                 ": no answer; rank 0 has to run there, MASTER_ADDR and the port to be its own");
}

// Its host may be gone without a word: the connection stands, and nothing comes.
TEST_F(MeetingTest, ARankThatFallsSilentIsNamedOnAllRanks) {
  std::promise<void> is_over;
  const std::shared_future<void> over = is_over.get_future().share();
  RankThreads::Run(3, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    if (rank == 2) return over.wait();
    std::vector<std::string> all;
    const Status silent =
        meeting->Exchange("", Within(rank == 0 ? milliseconds(500) : seconds(60)), &all);
    ExpectText(silent, rank == 0 ? StatusCode::kTimedOut : StatusCode::kAborted,
               "rank 2 did not answer rank 0 within start_timeout: a process is stopped, or a host "
               "or its link is gone");
    if (rank == 1) is_over.set_value();
  });
}

// Rank 1 says that it listens where nobody does, as if a firewall were before it.
TEST_F(MeetingTest, ARankThatIsRefusedForGoodIsToldOfOnAllRanksSoon) {
  const int nobody = FreePort();
  const auto begun = Clock::now();
  RankThreads::Run(3, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(120)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<Lines> lines;
    std::vector<std::string> all;
    if (rank == 1) {
      const std::string port = std::to_string(nobody);
      const std::string mine = std::to_string(port.size()) + " " + port + "0 ";
      ASSERT_TRUE(meeting->Exchange(mine, Within(seconds(120)), &all).ok());
      status = meeting->Exchange("", Within(seconds(120)), &all);
    } else {
      status = meeting->Connect(tests::HostsOf(3), Within(seconds(120)), &lines);
    }
    ExpectText(status, rank == 2 ? StatusCode::kBackend : StatusCode::kAborted,
               "rank 2 on host host2 cannot connect to rank 1 on host host1 at 127.0.0.1:" +
                   std::to_string(nobody) + ": Connection refused; a firewall may be between");
  });
  EXPECT_LT(Clock::now() - begun, seconds(60));  // where all were connecting for 90
}

TEST_F(MeetingTest, APortInUseIsNamedWithTheCure) {
  const core::Descriptor other = Listening(&port_);
  std::unique_ptr<Meeting> meeting;
  ExpectText(Meeting::Begin(PlaceOf(0, 2), Within(seconds(60)), &meeting), StatusCode::kBackend,
             "rank 0 cannot listen at port " + std::to_string(port_) +
                 " for the other ranks: Address already in use; SIRTAKI_PORT");
}

TEST_F(MeetingTest, ARankThatIsLostInAnExchangeIsNamed) {
  RankThreads::Run(3, [&](int rank) {
    std::unique_ptr<Meeting> meeting;
    const Status status = Meeting::Begin(PlaceOf(rank, 3), Within(seconds(60)), &meeting);
    ASSERT_TRUE(status.ok()) << status.ToString();
    if (rank == 2) return;
    std::vector<std::string> all;
    const Status lost = meeting->Exchange("", Within(seconds(60)), &all);
    EXPECT_NE(lost.message().find("rank 2 is lost during the start: "), std::string::npos)
        << lost.ToString();
  });
}

}  // namespace
}  // namespace sirtaki::tcp
