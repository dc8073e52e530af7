// Sessions over MPI: the composition of mpi/.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/gate.h"
#include "mpi/library.h"
#include "mpi/port.h"
#include "mpi/transport.h"
#include "session/base/medium.h"
#include "session/base/wire_parts.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"

namespace sirtaki::session {

using core::Status;

namespace {

class MpiMedium final : public Medium {
 public:
  explicit MpiMedium(std::unique_ptr<mpi::Environment> environment)
      : environment_(std::move(environment)), topology_(environment_->topology()) {}

  const Topology& topology() const override { return topology_; }
  std::string description() const override {
    return parts_ ? parts_->Description(environment_->description()) : environment_->description();
  }

  Status Exchange(const std::string& mine, core::TimePoint deadline,
                  std::vector<std::string>* all) override {
    return environment_->Exchange(mine, deadline, all);
  }

  Status Connect(const ConnectOptions& options, core::TimePoint deadline) override {
    // The engine, which says more of it, has half of that.
    mpi::LimitWaits(6 * options.config.peer_timeout);
    Status status = mpi::Communicators::Make(*environment_, deadline, &communicators_);
    if (!status.ok()) return status;
    return WireParts::Make(
        *this, options, deadline, std::make_unique<mpi::Transport>(*communicators_),
        std::make_unique<mpi::Port>(*communicators_, mpi::PortOptions()), &parts_);
  }

  core::Transport& transport() override { return parts_->transport(); }
  ops::Backends& backend() override { return parts_->backend(); }
  Status Meet(core::SetNumber set, const core::RankRanges& members, char mine,
              const std::function<Status()>& patience, std::string* all) override {
    return WireParts::Meet(parts_.get(), set, members, mine, patience, all);
  }
  std::function<Status()> PeerCheck() const override {
    return parts_ ? parts_->PeerCheck() : nullptr;
  }
  std::function<Status()> EntryOfGate(core::Gate** gate) override {
    *gate = &mpi::Gate();
    return [] { return mpi::Enter("an MpiGate of the program"); };
  }
  std::string GateHolder() const override { return mpi::Gate().Holder(); }
  Status MakeCommunicator(core::SetNumber set, const core::RankRanges& members,
                          int* fortran_handle) override {
    return mpi::Communicators::MakeForProgram(*environment_, set, members, fortran_handle);
  }
  void NoteFault() override { mpi::Environment::NoteFault(); }
  void NoteOrderlyEnd() override { environment_->NoteOrderlyEnd(); }
  Status BeforeEnd(std::function<void()> shutdown) override {
    return environment_->BeforeFinalize(std::move(shutdown));
  }

 private:
  // The parts are in the order in which they are made; the last ends first.
  const std::unique_ptr<mpi::Environment> environment_;
  const Topology topology_;
  std::unique_ptr<mpi::Communicators> communicators_;
  std::unique_ptr<WireParts> parts_;
};

// Where there is no MPI a job has one rank.
Status WhyNotAlone(const StartOptions& options) {
  if (options.communicator) {
    return {core::StatusCode::kUnsupported, "init() was given a communicator"};
  }
  const auto told = mpi::RanksOfLauncher(options.environment);
  if (!told) return Status::Ok();
  return {core::StatusCode::kUnsupported,
          "a launcher started " + told->count + " ranks (" + told->ToString() + ")"};
}

}  // namespace

std::vector<std::string> Session::MpiModules() { return mpi::FamiliesOfModules(); }

Status Session::CreateMpi(const StartOptions& options, std::shared_ptr<Session>* session) {
  if (Status status = CheckFork(); !status.ok()) return status;
  core::LogSettings log{options.config.log_level, options.config.log_time, {}};
  core::ConfigureLog(log);
  if (const Status none = mpi::OpenMpi(options.config.mpi_family, options.environment);
      none.code() == core::StatusCode::kUnsupported) {
    if (Status status = WhyNotAlone(options); !status.ok()) {
      return {status.code(), status.message() + ", but " + none.message()};
    }
    log.identity = {0, {}};
    core::ConfigureLog(log);
    SIRTAKI_LOG(kInfo, "a job of one rank, as " << none.message());
    return Create(std::make_shared<InprocWorld>(1)->Join(0), options, /*is_process=*/true, session);
  }
  mpi::EnvironmentOptions environment_options;
  environment_options.variables = options.environment;
  environment_options.mpi_family = options.config.mpi_family;
  environment_options.communicator = options.communicator;
  std::unique_ptr<mpi::Environment> environment;
  const core::TimePoint deadline = core::Clock::now() + options.config.start_timeout;
  if (Status status = mpi::Environment::Start(environment_options, deadline, &environment);
      !status.ok()) {
    return status;
  }
  log.identity = {environment->topology().rank, environment->topology().host};
  core::ConfigureLog(log);
  return Create(std::make_unique<MpiMedium>(std::move(environment)), options,
                /*is_process=*/true, session);
}

}  // namespace sirtaki::session
