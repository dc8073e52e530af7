// How a session comes to be: the ranks meet, agree, connect, and the parts are put together.
#include <algorithm>
#include <chrono>
#include <sstream>
#include <utility>

#include "core/base/log.h"
#include "core/machine/start_notice.h"
#include "core/protocol/tree.h"
#include "ops/base/keep_forever.h"
#include "session/base/clock_offset.h"
#include "session/base/devices.h"
#include "session/bootstrap.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "session/session_impl.h"
#include "session/session_observability.h"
#include "session/version_text.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;

namespace {

// However short peers' time is: a machine that is overloaded is not stuck.
constexpr auto kStuckAtLeast = std::chrono::seconds(10);

// How long a flight record waits for an engine that is busy.
constexpr auto kDescribePatience = std::chrono::milliseconds(500);

std::int64_t UnixMicroseconds() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

std::string Hexadecimal(std::uint64_t number) {
  std::ostringstream text;
  text << std::hex << number;
  return text.str();
}

// The ranks of this host decide together: all spin or none.
int CoresHere(const std::vector<Greeting>& greetings, const Topology& topology) {
  std::vector<core::CpuShare> shares;
  for (std::size_t rank = 0; rank < greetings.size(); ++rank) {
    const auto here = static_cast<std::size_t>(topology.rank);
    if (topology.host_of_rank[rank] == topology.host_of_rank[here]) {
      shares.push_back(greetings[rank].cpus);
    }
  }
  return core::SharedCores(shares);
}

std::string WhereText(const Topology& topology) {
  std::ostringstream text;
  text << "Sirtaki " << VersionText() << ": rank " << topology.rank << " of " << topology.size
       << " on " << topology.host << " (local rank " << topology.local_rank << " of "
       << topology.local_size << ", cross rank " << topology.cross_rank << " of "
       << topology.cross_size << ")";
  return text.str();
}

// The text says what moves data in the world. Precondition: the medium is connected.
std::string CarriersText(const Topology& topology, Medium& medium, const GpuLibraries& gpus) {
  if (topology.size == 1) return "one rank: no data moves";
  const ops::Channel channel{core::kWorldSet, fusion::Lane::kLarge};
  const ops::Route route = medium.backend().Select(channel);
  const std::string_view rootless = route.rootless->name();
  const std::string_view others = route.backend->name();
  std::string text = "host data moves by ";
  text += others;
  if (rootless != others) {
    text.append(", in all-reduce, reduce-scatter and all-gather ").append(rootless);
  }
  if (gpus.kernels == nullptr) return text + ", GPU data not at all: " + gpus.why_no_kernels;
  return text + ", GPU data by NCCL, opened at its first use";
}

// Reads what the ranks have told, and makes the configuration one that all of them have.
Status ReadGreetings(const std::vector<std::string>& told, std::vector<Greeting>* greetings,
                     core::Config* config) {
  std::vector<Status> statuses;
  std::vector<core::Config> configs;
  for (const std::string& text : told) {
    Greeting& greeting = greetings->emplace_back();
    Status read = Deserialize(text, &greeting);
    statuses.push_back(read.ok() ? greeting.status : std::move(read));
    configs.push_back(greeting.config);
  }
  if (Status status = FirstFailure(statuses); !status.ok()) return status;
  return core::AgreeConfigs(configs, config);
}

void TakeNcclOptions(const core::Config& config, const core::EnvironmentView& environment,
                     ops::LanesOptions* lanes) {
  lanes->nccl_limit = config.nccl_limit;
  lanes->registers_arenas = config.gradient_arena == core::GradientArenaMode::kAuto;
  lanes->nccl_direct = config.nccl_direct;
  lanes->nccl_shares = environment.Find("NCCL_COMM_SPLIT_SHARE_RESOURCES") != "0";
  if (config.nccl_max_ctas > 0) lanes->nccl_max_ctas = config.nccl_max_ctas;
  if (config.nccl_cta_policy == core::NcclCtaPolicy::kEfficiency) {
    lanes->nccl_cta_policy = ops::nccl::kCtaPolicyEfficiency;
  } else if (config.nccl_cta_policy == core::NcclCtaPolicy::kZero) {
    lanes->nccl_cta_policy = ops::nccl::kCtaPolicyZero;
  }
}

}  // namespace

Status Session::CreateInproc(std::shared_ptr<InprocWorld> world, int rank,
                             const StartOptions& options, std::shared_ptr<Session>* session) {
  return Create(world->Join(rank), options, /*is_process=*/false, session);
}

Status Session::Create(std::unique_ptr<Medium> medium, const StartOptions& options, bool is_process,
                       std::shared_ptr<Session>* session) {
  std::shared_ptr<Session> made(new Session());
  made->is_process_ = is_process;
  // Before the engine's thread is there: the medium may allow one call at a time.
  Status status = medium->BeforeEnd([weak = std::weak_ptr<Session>(made)] {
    const auto alive = weak.lock();
    if (alive) static_cast<void>(alive->Shutdown("the program has finalized MPI"));
  });
  const core::TimePoint deadline = core::Clock::now() + options.config.start_timeout;
  if (status.ok()) {
    try {
      status = made->Start(std::move(medium), options, deadline);
    } catch (...) {  // a system without threads or memory
      status = core::StatusOfException();
    }
  }
  if (!status.ok()) {
    if (made->impl_ && made->impl_->engine) made->impl_->engine->StopThread();
    if (made->observation_) made->EndObservation();
    made->state_ = State::kGone;  // there is nothing to leave
    made->EndParts();
    return status;
  }
  *session = std::move(made);
  return Status::Ok();
}

Status Session::Start(std::unique_ptr<Medium> medium, const StartOptions& options,
                      core::TimePoint deadline) {
  topology_ = medium->topology();
  const std::string mine = Serialize(Greet(options.parsed, options.config));
  std::vector<std::string> told;
  if (Status status = medium->Exchange(mine, deadline, &told); !status.ok()) return status;

  std::vector<Greeting> greetings;
  config_ = options.config;
  if (Status status = ReadGreetings(told, &greetings, &config_); !status.ok()) return status;

  const int cores = CoresHere(greetings, topology_);
  cores_per_rank_ = std::max(1, cores / topology_.local_size);
  const bool spin = config_.wait == core::WaitMode::kAuto ? topology_.local_size <= cores
                                                          : config_.wait == core::WaitMode::kSpin;
  // The ranks agree on errors, so that none waits for one whose start has failed.
  const auto agree = [&told, deadline, &exchanges = *medium](const Status& here) {
    Status met = exchanges.Exchange(SerializeStatus(here), deadline, &told);
    if (!here.ok()) return here;
    return met.ok() ? FirstFailure(told) : met;
  };
  if (topology_.size > 1) {
    const Status connected = core::OrThrown([&] {
      return medium->Connect({config_, spin}, deadline);
    });
    if (Status all = agree(connected); !all.ok()) return all;
  }
  core::Duration offset{};
  if (Status status = MeasureOffset(*medium, deadline, &offset); !status.ok()) return status;

  Status built = core::OrThrown([&] {
    devices_ = std::make_unique<Devices>(options.gpus ? *options.gpus : GpuLibraries::OfProcess());
    std::ostringstream text;
    text << WhereText(topology_) << "; " << medium->description();
    text << "; " << CarriersText(topology_, *medium, devices_->libraries()) << "; " << cores
         << " cores for the ranks of this host, " << cores_per_rank_ << " for each; waits "
         << (spin ? "spin" : "yield") << "; options: " << core::DescribeConfig(config_);
    description_ = text.str();
    SIRTAKI_LOG(kInfo, description_);
    if (topology_.rank == 0) {
      const std::string warning = core::UnknownVariablesWarning(options.environment);
      if (!warning.empty()) core::Log(core::LogLevel::kWarning, warning);
    }
    token_ = greetings.front().token;
    observation_ = std::make_shared<SessionObservability>(
        options.observer ? options.observer : std::make_shared<core::trace::Observer>(),
        SessionObservability::Options{.config = config_,
                                      .topology = topology_,
                                      .offset = offset,
                                      .origin = greetings.front().clock,
                                      .session = Hexadecimal(token_),
                                      .is_process = is_process_,
                                      .describe = [this](const std::string& why) {
                                        return Describe(why, kDescribePatience);
                                      }});
    impl_ = std::make_shared<Impl>();
    impl_->medium = std::move(medium);  // agree() needs it whatever is thrown
    Build(options, spin);
    observation_->Begin();
    return Status::Ok();
  });
  if (topology_.size > 1) built = agree(built);
  if (!built.ok()) return built;
  if (is_process_) core::TellStart(options.environment, core::StartNotice::kAgain);
  if (topology_.size > 1) {
    try {
      if (Status made = MakeFirstSets(deadline); !made.ok()) return made;
    } catch (...) {
      Status why = core::StatusOfException();
      impl_->engine->Abort(why.code(), why.message());
      return why;
    }
  }
  impl_->medium->EndStart();
  // The ranks that are here have ended their session before this one.
  ops::DropKept();
  return Status::Ok();
}

void Session::Build(const StartOptions& options, bool spin) {
  Impl& parts = *impl_;
  std::map<core::SetNumber, core::RankRanges> sets = sets_.Begin(topology_);
  if (topology_.size == 1) {
    parts.hooks = std::make_shared<core::HandleHooks>(nullptr, &parts.queue);
    return;
  }
  core::NegotiatorOptions negotiation;
  negotiation.rank = topology_.rank;
  negotiation.host = topology_.host;
  negotiation.sets = std::move(sets);
  negotiation.id_capacity = static_cast<std::size_t>(config_.id_capacity);
  negotiation.stall_warning = config_.stall_warning;
  negotiation.stall_limit = config_.stall_limit;
  negotiation.ping_interval = config_.ping_interval;
  negotiation.peer_timeout = config_.peer_timeout;
  negotiation.reaches_all = parts.medium->transport().ReachesAll();
  negotiation.activity = [&parts] { return parts.engine->Activity(); };
  negotiation.waits_for = [&parts] { return parts.engine->WaitsFor(); };
  negotiation.unix_us = UnixMicroseconds;
  const core::Tree tree(topology_.host_of_rank, config_.tree_arity);
  parts.negotiator = std::make_unique<core::Negotiator>(std::move(negotiation), tree);

  ops::LanesOptions all_lanes;
  all_lanes.load_nccl = devices_->libraries().load_nccl;
  all_lanes.kernels = devices_->libraries().kernels;
  all_lanes.why_no_kernels = devices_->libraries().why_no_kernels;
  all_lanes.kernels_toolkit = devices_->libraries().kernels_toolkit;
  TakeNcclOptions(config_, options.environment, &all_lanes);
  ops::HostLanesOptions& lanes = all_lanes.host;
  lanes.rank = topology_.rank;
  lanes.deterministic = config_.deterministic;
  lanes.on_failure = [&parts](const Status& why, const std::string& tensor) {
    parts.engine->PostFailure(why, tensor);
  };
  lanes.on_progress = [&parts] { parts.engine->Ring(); };
  lanes.observer = observation_->observer();
  lanes.medium = parts.medium;
  parts.lanes = std::make_unique<ops::Lanes>(std::move(all_lanes), parts.medium->backend());

  core::EngineOptions engine;
  engine.session = token_;
  engine.rank = topology_.rank;
  engine.host = topology_.host;
  engine.spin = spin;
  engine.sits_after = config_.stall_warning / 2;
  engine.on_fault = [&parts, seen = observation_, is_process = is_process_,
                     env = options.environment](const Status& why) {
    parts.medium->NoteFault();
    seen->NoteFault();
    if (is_process) core::TellStart(env, core::StartNotice::kFault, why.ToString());
  };
  engine.on_stuck = [&parts, seen = observation_] {
    parts.medium->NoteFault();
    seen->NoteFault();
  };
  engine.stuck_in = [&parts] { return parts.medium->GateHolder(); };
  engine.check_peers = parts.medium->PeerCheck();
  engine.on_start = options.on_start;
  engine.observer = observation_->observer();
  engine.limits = core::Limits::Of(config_);
  engine.stuck_limit = std::max<core::Duration>(3 * config_.peer_timeout, kStuckAtLeast);
  engine.on_stall = [seen = observation_](const core::StallWarning& warning) {
    core::Log(core::LogLevel::kWarning, seen->InWords(core::StallText(warning)));
  };
  engine.in_words = [seen = observation_](const std::string& text) { return seen->InWords(text); };
  engine.step = [seen = observation_] { return seen->steps().Number(); };
  parts.engine = std::make_unique<core::Engine>(std::move(engine), parts.medium->transport(),
                                                *parts.negotiator, parts.queue, *parts.lanes);
}

}  // namespace sirtaki::session
