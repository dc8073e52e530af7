// Sessions over MPI: the composition of mpi/.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "mpi/backend.h"
#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/transport.h"
#include "session/base/host_group_setup.h"
#include "session/base/medium.h"
#include "session/base/process_pool.h"
#include "session/session.h"

namespace sirtaki::session {

using core::Status;

namespace {

mpi::Threads ThreadsOf(core::MpiThreads choice) {
  switch (choice) {
    case core::MpiThreads::kMultiple:
      return mpi::Threads::kMultiple;
    case core::MpiThreads::kSerialized:
      return mpi::Threads::kSerialized;
    case core::MpiThreads::kAuto:
      break;
  }
  return mpi::Threads::kAuto;
}

class MpiMedium final : public Medium {
 public:
  MpiMedium(std::unique_ptr<mpi::Environment> environment, const core::Config& config)
      : environment_(std::move(environment)),
        topology_(environment_->topology()),
        carries_data_(topology_.cross_size > 1 ||
                      config.shared_memory == core::SharedMemoryMode::kOff ||
                      config.transport == core::TransportMode::kMpi) {}

  const Topology& topology() const override { return topology_; }
  std::string description() const override {
    const std::string shared = shared_ ? shared_->description() : "";
    const bool races = serialized_ && environment_->threads_race();
    return environment_->description() +
           (races ? "; one thread at a time calls MPI, as Open MPI's ob1 can lose data when two do "
                    "(mpi_threads)"
                  : "") +
           (shared.empty() ? "" : "; " + shared);
  }
  bool serialized() const override {
    return environment_->serialized() || (carries_data_ && environment_->threads_race());
  }
  bool threads_race() const override { return environment_->threads_race(); }

  Status Exchange(const std::string& mine, core::TimePoint deadline,
                  std::vector<std::string>* all) override {
    return environment_->Exchange(mine, deadline, all);
  }

  Status Connect(ConnectOptions* options, core::TimePoint deadline) override {
    Status status = mpi::Communicators::Make(*environment_, deadline, &communicators_);
    if (!status.ok()) return status;
    ops::shm::LocalGroupOptions group;
    group.rank = topology_.rank;
    group.pool = PoolOfProcess(options->config, topology_.local_size);
    status = HostGroup::Meet(*this, options, deadline, std::move(group), &shared_);
    if (!status.ok()) return status;
    serialized_ = options->serialized;
    transport_ = std::make_unique<mpi::Transport>(*communicators_);
    mpi::BackendOptions backend;
    backend.serialized = serialized_;
    backend_ = std::make_unique<mpi::Backend>(*communicators_, backend);
    return shared_->Assemble(topology_, *options, *transport_, *backend_);
  }

  core::Transport& transport() override { return shared_->transport(); }
  ops::Backend& backend() override { return shared_->backend(); }
  Status MakeCommunicator(core::SetNumber set, const core::RankRanges& members,
                          int* fortran_handle) override {
    if (environment_->serialized()) {
      return {
          core::StatusCode::kUnsupported,
          "communicator() needs MPI_THREAD_MULTIPLE: the library calls MPI in another thread at "
          "the same time"};
    }
    return mpi::Communicators::MakeForProgram(*environment_, set, members, fortran_handle);
  }
  void NoteFault() override { mpi::Environment::NoteFault(); }
  void NoteOrderlyEnd() override { environment_->NoteOrderlyEnd(); }
  Status BeforeEnd(std::function<void()> shutdown) override {
    return environment_->BeforeFinalize(std::move(shutdown));
  }

 private:
  // In the order in which they are made; the last ends first.
  const std::unique_ptr<mpi::Environment> environment_;
  const Topology topology_;
  const bool carries_data_;  // as far as is known before the ranks of a host have met
  bool serialized_ = false;
  std::unique_ptr<mpi::Communicators> communicators_;
  std::unique_ptr<mpi::Transport> transport_;
  std::unique_ptr<mpi::Backend> backend_;
  std::unique_ptr<HostGroup> shared_;
};

}  // namespace

Status Session::CreateMpi(const StartOptions& options, std::shared_ptr<Session>* session) {
  if (Status status = CheckFork(); !status.ok()) return status;
  core::LogSettings log{options.config.log_level, options.config.log_time, {}};
  core::ConfigureLog(log);
  mpi::EnvironmentOptions environment_options;
  environment_options.threads = ThreadsOf(options.config.mpi_threads);
  environment_options.variables = options.environment;
  environment_options.communicator = options.communicator;
  std::unique_ptr<mpi::Environment> environment;
  const core::TimePoint deadline = core::Clock::now() + options.config.start_timeout;
  if (Status status = mpi::Environment::Start(environment_options, deadline, &environment);
      !status.ok()) {
    return status;
  }
  log.identity = {environment->topology().rank, environment->topology().host};
  core::ConfigureLog(log);
  return Create(std::make_unique<MpiMedium>(std::move(environment), options.config), options,
                /*is_process=*/true, session);
}

}  // namespace sirtaki::session
