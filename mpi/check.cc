#include "mpi/check.h"

#include <array>
#include <chrono>
#include <string>

#include "core/threads/cooling_sleep.h"
#include "mpi/gate.h"
#include "mpi/library.h"

namespace sirtaki::mpi {

using core::Status;
using core::StatusCode;

namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(5);

}  // namespace

Status Check(int code, const char* call) {
  if (code == 0) return Status::Ok();
  std::array<char, 1024> text{};
  std::string words = "unknown error " + std::to_string(code);
  if (TheApi().ErrorString(code, text.data(), text.size()) == 0 && text[0] != '\0') {
    words = text.data();
  }
  return {StatusCode::kBackend, std::string(call) + ": " + words};
}

Status CheckReceived(const Received& received, const Expected& expected, const std::string& call) {
  if (received.bytes == expected.bytes && received.source == expected.source &&
      received.tag == expected.tag && !received.cancelled) {
    return Status::Ok();
  }
  return {StatusCode::kBackend,
          call + ": " + std::to_string(received.bytes) + " bytes came where " +
              std::to_string(expected.bytes) + " were expected (from rank " +
              std::to_string(received.source) + " where " + std::to_string(expected.source) +
              " was expected, tag " + std::to_string(received.tag) + " where " +
              std::to_string(expected.tag) + " was expected, MPI_ERROR " +
              std::to_string(received.error) + (received.cancelled ? ", cancelled)" : ")")};
}

Status WaitUntil(Request* request, core::TimePoint deadline, const char* call) {
  core::CoolingSleep sleep(kLongestSleep);
  for (;;) {
    int done = 0;
    const Status status = InMpi(call, [&] { return TheApi().Test(request, &done, nullptr); });
    if (!status.ok() || done != 0) return status;
    if (core::Clock::now() >= deadline) {
      return {StatusCode::kTimedOut,
              std::string(call) + ": the other ranks did not take part in time"};
    }
    sleep.Pause();
  }
}

}  // namespace sirtaki::mpi
