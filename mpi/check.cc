#include "mpi/check.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <thread>

namespace sirtaki::mpi {

using core::Status;
using core::StatusCode;

Status Check(int code, const char* call) {
  if (code == MPI_SUCCESS) return Status::Ok();
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  std::string words = "unknown error " + std::to_string(code);
  if (MPI_Error_string(code, text.data(), &length) == MPI_SUCCESS && length > 0) {
    words.assign(text.data(), static_cast<std::size_t>(length));
  }
  return {StatusCode::kBackend, std::string(call) + ": " + words};
}

void CoolingSleep::Pause() {
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  const core::Duration waited = core::Clock::now() - since_;
  if (waited < microseconds(50)) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(
      std::clamp<core::Duration>(waited / 20, microseconds(20), milliseconds(5)));
}

Status WaitUntil(MPI_Request* request, core::TimePoint deadline, const char* call) {
  CoolingSleep sleep;
  for (;;) {
    int done = 0;
    if (Status status = Check(MPI_Test(request, &done, MPI_STATUS_IGNORE), call); !status.ok()) {
      return status;
    }
    if (done != 0) return Status::Ok();
    if (core::Clock::now() >= deadline) {
      return {StatusCode::kTimedOut,
              std::string(call) + ": the other ranks did not take part in time"};
    }
    sleep.Pause();
  }
}

}  // namespace sirtaki::mpi
