// Initialises MPI, through a session, on a thread that has ended when the process exits.
#include <memory>
#include <thread>

#include "core/base/log.h"
#include "session/session.h"

int main() {
  int code = 1;
  std::thread([&code] {
    std::shared_ptr<sirtaki::session::Session> session;
    const auto status = sirtaki::session::Session::CreateOfProcess({}, &session);
    if (!status.ok()) {
      sirtaki::core::Log(sirtaki::core::LogLevel::kError, status.ToString());
      return;
    }
    code = session->Shutdown("done").ok() ? 0 : 1;
  }).join();
  return code;
}
