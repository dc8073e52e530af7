// CreateMpi in a build without MPI: a job of one rank.
#include <string>

#include "core/base/log.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"

namespace sirtaki::session {

core::Status Session::CreateMpi(const StartOptions& options, std::shared_ptr<Session>* session) {
  if (core::Status status = CheckFork(); !status.ok()) return status;
  if (options.communicator) {
    return {core::StatusCode::kUnsupported,
            "init() was given a communicator, but this build of Sirtaki has no MPI: build it with "
            "SIRTAKI_MPI=ON"};
  }
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const std::string value = options.environment.Find(name).value_or("1");
    if (value == "1") continue;
    return {core::StatusCode::kUnsupported,
            "a launcher started " + value + " ranks (" + name + "=" + value +
                "), but this build of Sirtaki has no MPI: build it with SIRTAKI_MPI=ON"};
  }
  core::ConfigureLog({options.config.log_level, options.config.log_time, {0, {}}});
  return Create(std::make_shared<InprocWorld>(1)->Join(0), options, /*is_process=*/true, session);
}

}  // namespace sirtaki::session
