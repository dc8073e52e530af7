#include "mpi/check.h"

#include <array>
#include <chrono>
#include <string>

#include "core/threads/cooling_sleep.h"
#include "mpi/gate.h"

namespace sirtaki::mpi {

using core::Status;
using core::StatusCode;

namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(5);

}  // namespace

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

Status CheckReceived(const MPI_Status& received, const Expected& expected,
                     const std::string& call) {
  int bytes = 0;
  int cancelled = 0;
  MPI_Get_count(&received, MPI_BYTE, &bytes);
  MPI_Test_cancelled(&received, &cancelled);
  if (bytes == expected.bytes && received.MPI_SOURCE == expected.source &&
      received.MPI_TAG == expected.tag && cancelled == 0) {
    return Status::Ok();
  }
  return {StatusCode::kBackend,
          call + ": " + std::to_string(bytes) + " bytes came where " +
              std::to_string(expected.bytes) + " were expected (from rank " +
              std::to_string(received.MPI_SOURCE) + " where " + std::to_string(expected.source) +
              " was expected, tag " + std::to_string(received.MPI_TAG) + " where " +
              std::to_string(expected.tag) + " was expected, MPI_ERROR " +
              std::to_string(received.MPI_ERROR) + (cancelled != 0 ? ", cancelled)" : ")")};
}

Status WaitUntil(MPI_Request* request, core::TimePoint deadline, const char* call) {
  core::CoolingSleep sleep(kLongestSleep);
  for (;;) {
    int done = 0;
    const Status status = InMpi(call, [&] { return MPI_Test(request, &done, MPI_STATUS_IGNORE); });
    if (!status.ok() || done != 0) return status;
    if (core::Clock::now() >= deadline) {
      return {StatusCode::kTimedOut,
              std::string(call) + ": the other ranks did not take part in time"};
    }
    sleep.Pause();
  }
}

}  // namespace sirtaki::mpi
