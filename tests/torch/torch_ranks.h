// Threads as ranks, each with a session of its own, to which its calls belong.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "sirtaki/error.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::tests {

// Runs `body` on `size` threads and ends their sessions when all of them have returned from it.
// `host_of_rank`: which of them pretend to share a host; empty: all do. `sharing`: and how.
inline void RunTorchRanks(
    int size, const std::function<void(int rank)>& body, const core::Config& config = {},
    std::vector<int> host_of_rank = {},
    session::InprocWorld::Sharing sharing = session::InprocWorld::Sharing::kNone,
    const std::function<void(int rank, const core::RunBatch&)>& on_start = nullptr) {
  const auto world = std::make_shared<session::InprocWorld>(size, std::move(host_of_rank));
  world->Share(sharing);
  RankThreads::Run(size, [&](int rank) {
    session::StartOptions options;
    options.config = config;
    if (on_start) {
      options.on_start = [&on_start, rank](const core::RunBatch& batch) { on_start(rank, batch); };
    }
    std::shared_ptr<session::Session> session;
    const core::Status started = session::Session::CreateInproc(world, rank, options, &session);
    ASSERT_TRUE(started.ok()) << started.ToString();
    {
      const detail::SessionScope scope(std::make_shared<detail::SessionState>(session));
      body(rank);
    }
    (void)session->Shutdown("the test is over");
  });
}

// Calls it and gives the text of the Error that it throws, which must have this code.
inline std::string ErrorOf(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown; expected: " << error_code_name(code);
  return {};
}

}  // namespace sirtaki::tests
