// Trains a small net in an elastic job, until a file says that it is enough: elastic_program.py by the C++
// API. elastic_job.py starts it, and ends some of its processes.
//
//   elastic_twin FILE [MODE | GENERATIONS]   GENERATIONS: it makes that many by itself, and looks at
//                                            what they leave behind
#include <malloc.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 60;
constexpr std::size_t kBatch = 2;
// Rank 0 stays this long after an error that ends the job: sirtakirun has to end it, and starts nobody
// meanwhile.
constexpr auto kLingers = std::chrono::minutes(10);
constexpr auto kPause =
    std::chrono::milliseconds(10);           // between steps: some are left when a change comes
constexpr std::int64_t kStepsOfCommit = 10;  // where step() is called after each

constexpr int kWarm = 20;   // generations, until all is there that stays
constexpr int kLooks = 10;  // generations that are looked at

struct Net : torch::nn::Module {
  Net() {
    register_module("hidden", hidden);
    register_module("norm", norm);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    // Several values per channel, in a batch of one sample too.
    return output(norm(hidden(x).view({-1, 2, 4})).view({-1, 8}));
  }

  torch::nn::Linear hidden{6, 8};
  torch::nn::BatchNorm1d norm{2};
  torch::nn::Linear output{8, 1};
};

// Its weight goes down by 1 with each step of an optimizer, as no other state of a rank can tell.
struct Counter : torch::nn::Module {
  Counter() { register_parameter("weight", weight); }
  void check(std::int64_t steps) const {
    const auto made = -weight.item<float>();
    if (std::abs(made - static_cast<float>(steps)) < 0.5F) return;
    throw std::runtime_error("the parameters have gone through " + std::to_string(made) +
                             " steps, the state tells of " + std::to_string(steps));
  }

  torch::Tensor weight = torch::zeros({1}, torch::requires_grad());
};

// Whether this is the first worker that comes later.
bool IsFirstToCome(const std::string& enough) {
  const std::string marker = enough + ".other";
  if (sirtaki::elastic::generation() <= 1 || std::filesystem::exists(marker)) return false;
  std::ofstream(marker).put('x');
  return true;
}

// A part of the state that the first worker which comes later, and gets that far, cannot take.
struct Picky {
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("nothing", torch::zeros({1}));
  }
  void load(torch::serialize::InputArchive& /*archive*/) const {
    if (!comes_later || std::filesystem::exists(marker)) return;
    std::ofstream(marker).put('x');
    throw std::runtime_error("no memory is left for it");
  }

  std::string marker;
  bool comes_later = sirtaki::elastic::generation() > 1;
};

constexpr std::int64_t kLarge = 1000;  // elements: several ranks have parts of them

// A net whose gradient is exact, in whatever order the ranks' are added up: small whole numbers. So one
// process that makes the same steps has the same bits.
struct Exact : torch::nn::Module {
  Exact() {
    register_parameter("large", large);
    register_parameter("small", small);
  }
  // By sample.
  static torch::Tensor gradients(const torch::Tensor& parameter) {
    return (torch::arange(parameter.numel()) + 3 * torch::arange(kSamples).view({-1, 1}))
        .remainder(7)
        .sub(3)
        .to(torch::kFloat);
  }
  torch::Tensor forward(const torch::Tensor& samples) {
    return (large * gradients(large).index_select(0, samples).sum(0)).sum() +
           (small * gradients(small).index_select(0, samples).sum(0)).sum();
  }

  torch::Tensor large = torch::zeros({kLarge}, torch::requires_grad());
  torch::Tensor small = torch::zeros({5}, torch::requires_grad());
};

constexpr double kRateOfExact = 0.01;
constexpr std::int64_t kStepsOfCopy = 4;

// Throws where the sharded optimizer and its parameters are not, to the bit, what one process makes of
// the steps with these samples.
void check_exact(Exact& exact, torch::optim::Optimizer& optimizer, const torch::Tensor& history) {
  Exact alone;
  torch::optim::Adam adam(alone.parameters(), kRateOfExact);
  const auto samples = history.to(torch::kFloat);
  const auto of_large = Exact::gradients(alone.large);
  const auto of_small = Exact::gradients(alone.small);
  for (std::int64_t step = 0; step < history.size(0); ++step) {
    alone.large.mutable_grad() = samples[step].matmul(of_large);
    alone.small.mutable_grad() = samples[step].matmul(of_small);
    adam.step();
  }
  const auto fail = [&](const char* what) {
    throw std::runtime_error(std::string(what) + " is not that of one process after " +
                             std::to_string(history.size(0)) + " steps");
  };
  const auto ours = exact.parameters();
  const auto theirs = alone.parameters();
  auto* const reducer = sirtaki::detail::ReducerOf(optimizer);
  const bool is_cut = reducer->has_sharded_state();
  std::int64_t looked = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (!ours[i].equal(theirs[i])) fail("a parameter");
    if (history.size(0) == 0) continue;
    torch::Tensor mine = is_cut ? torch::Tensor() : ours[i];
    std::int64_t begin = 0;
    if (is_cut) {
      for (const auto& shard : reducer->shards()) {
        if (!shard.parameter.is_same(ours[i])) continue;
        mine = shard.shard;
        begin = shard.begin;
      }
    }
    if (!mine.defined()) continue;
    const auto found = optimizer.state().find(mine.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) fail("a missing state of a shard");
    const auto& now = static_cast<const torch::optim::AdamParamState&>(*found->second);
    const auto& wanted = static_cast<const torch::optim::AdamParamState&>(
        *adam.state().at(theirs[i].unsafeGetTensorImpl()));
    const auto part = [&](const torch::Tensor& whole) {
      return whole.view(-1).narrow(0, begin, mine.numel());
    };
    if (now.step() != wanted.step()) fail("the number of Adam's steps");
    if (!now.exp_avg().view(-1).equal(part(wanted.exp_avg()))) fail("a shard's average");
    if (!now.exp_avg_sq().view(-1).equal(part(wanted.exp_avg_sq()))) fail("a shard's variance");
    const bool is_whole = mine.numel() == kLarge && sirtaki::local_size() > 1;
    if (is_cut && is_whole) fail("a parameter that is not cut");
    looked += mine.numel();
  }
  if (history.size(0) > 0 && looked == 0) fail("the state of no shard");
  std::printf("exact %" PRId64 " %" PRId64 "\n", history.size(0), looked);
}

std::uint64_t digest(const torch::nn::Module& module) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const auto& parameter : module.parameters()) {
    const auto values = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
    for (std::size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

// Every sample of the epoch was trained, and once. Only as many are there twice as have filled up the
// ranks' shares when those that were left were dealt out last.
void check(const torch::Tensor& trained, std::int64_t filled) {
  const auto missing = (trained == 0).sum().item<std::int64_t>();
  const auto twice = trained.sum().item<std::int64_t>() - kSamples;
  if (missing == 0 && twice == filled) return;
  throw std::runtime_error(std::to_string(missing) + " samples were not trained, " +
                           std::to_string(twice) + " twice, and " + std::to_string(filled) +
                           " have filled up shares");
}

// Makes generations, and looks at what they leave in this process: the least of some that follow each
// other.
class Leaves {
 public:
  explicit Leaves(int generations) : generations_(generations) {}

  void check() {
    const int generation = sirtaki::elastic::generation();
    if (generation >= generations_) {
      if (generations_ > 0 && !std::exchange(compared_, true)) compare();
      return;
    }
    if (generation >= kWarm && generation < kWarm + kLooks) take(&before_);
    if (generation >= generations_ - kLooks) take(&after_);
    if (sirtaki::rank() == generation % sirtaki::size()) {
      throw sirtaki::Error(sirtaki::ErrorCode::Aborted, "another generation is wanted");
    }
  }

 private:
  struct Kind {
    const char* name;
    std::int64_t excuse;
  };
  static constexpr std::array<Kind, 4> kKinds = {
      {{"descriptors", 0}, {"threads", 0}, {"mappings", 4}, {"KiB", 1024}}};
  using Counts = std::array<std::int64_t, kKinds.size()>;

  static Counts look() {
    const auto files = [](const char* folder) {
      std::int64_t count = 0;
      for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder)) ++count;
      return count;
    };
    malloc_trim(0);  // an allocator gives back what is free when it likes
    std::int64_t mappings = 0;
    std::string line;
    for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) ++mappings;
    std::int64_t kib = 0;
    for (std::ifstream status("/proc/self/status"); std::getline(status, line);) {
      if (line.rfind("VmRSS:", 0) == 0) kib = std::stoll(line.substr(6));
    }
    return {files("/proc/self/fd"), files("/proc/self/task"), mappings, kib};
  }

  static void take(std::optional<Counts>* least) {
    const Counts now = look();
    if (!*least) *least = now;
    for (std::size_t i = 0; i < now.size(); ++i) (**least)[i] = std::min((**least)[i], now[i]);
  }

  void compare() const {
    if (!before_ || !after_) return;  // it has come late
    bool leaves = false;
    for (std::size_t i = 0; i < kKinds.size(); ++i) {
      const std::int64_t more = (*after_)[i] - (*before_)[i];
      std::printf("leaves %" PRId64 " %s after %d generations: %" PRId64 " to %" PRId64 "\n", more,
                  kKinds[i].name, generations_ - kWarm, (*before_)[i], (*after_)[i]);
      leaves = leaves || more > kKinds[i].excuse;
    }
    if (leaves) throw std::runtime_error("generations leave something behind");
  }

  int generations_;
  bool compared_ = false;
  std::optional<Counts> before_;
  std::optional<Counts> after_;
};

// Makes calls before run(), which are refused.
template <class Optimizer>
void call_early(Net& net, Optimizer& optimizer) {
  const auto make = [](const char* name, const auto& call) {
    try {
      call();
      std::printf("early %s: not refused\n", name);
    } catch (const sirtaki::Error& error) {
      const bool is_invalid = error.code() == sirtaki::ErrorCode::InvalidArgument;
      std::printf("early %s: %s%s\n", name, is_invalid ? "" : "another code: ", error.what());
    }
  };
  make("broadcast_parameters", [&] { sirtaki::broadcast_parameters(net, 0); });
  make("broadcast_optimizer_state", [&] { sirtaki::broadcast_optimizer_state(optimizer, 0); });
  make("broadcast_object", [] { (void)sirtaki::broadcast_object(std::string("text"), 0); });
  make("allreduce_async", [] { (void)sirtaki::allreduce_async(torch::ones({2})); });
  make("barrier", [] { sirtaki::barrier(); });
  make("join", [] { (void)sirtaki::join(); });
  make("add_process_set", [] { (void)sirtaki::add_process_set({0}); });
}

// The mode is described in elastic_program.py.
void train(const std::string& enough, const std::string& mode) {
  const int generations = std::atoi(mode.c_str());  // 0: it is no number
  torch::manual_seed(
      static_cast<std::uint64_t>(sirtaki::rank()));  // only run() makes the nets equal
  Net net;
  Counter counter;
  torch::optim::SGD local(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  local.add_param_group({counter.parameters(), std::make_unique<torch::optim::SGDOptions>(1.0)});
  auto names = net.named_parameters();
  const bool is_other = mode == "newcomer fails" && IsFirstToCome(enough);
  names.insert(is_other ? "steps of another program" : "steps that were made", counter.weight);
  auto optimizer = sirtaki::DistributedOptimizer(
      std::move(local), names, sirtaki::DistributedOptimizerOptions().fused(mode != "steps"));
  const auto inputs = torch::sin(torch::arange(kSamples * 6, torch::kFloat) * 1.7F).view({-1, 6});
  const auto targets = inputs.sum(1, /*keepdim=*/true);
  sirtaki::DistributedSampler sampler(kSamples);
  std::int64_t epoch = 0;
  std::int64_t steps = 0;
  std::int64_t filled = 0;                                // samples, in this epoch
  auto trained = torch::zeros({kSamples}, torch::kLong);  // how often, in this epoch
  auto state = sirtaki::elastic::State()
                   .model(net)
                   .model(counter, "counter")
                   .optimizer(optimizer)
                   .sampler(sampler)
                   .value("epoch", epoch)
                   .value("steps", steps)
                   .value("filled", filled)
                   .value("trained", trained);

  Picky picky{enough + ".picky"};
  if (mode == "newcomer fails") state.object("picky", picky);

  if (mode == "lost before run" && sirtaki::rank() == 1 && sirtaki::elastic::generation() == 1) {
    std::raise(SIGKILL);
  }
  if (mode == "early calls") call_early(net, optimizer);

  const auto is_enough = [&] {
    return sirtaki::broadcast_object(std::filesystem::exists(enough) ? "yes" : "no", 0) == "yes";
  };
  Leaves leaves(generations);
  const auto run = [&] {
    if (mode == "fails") throw sirtaki::Error(sirtaki::ErrorCode::Backend, "on purpose");
    const int generation = sirtaki::elastic::generation();
    std::printf("begins %d %d %" PRId64 " %" PRId64 " %d %016" PRIx64 "\n", sirtaki::rank(),
                sirtaki::size(), epoch, steps, generation, digest(net));
    counter.check(steps);
    bool first = true;
    while (!is_enough()) {
      const std::int64_t left = (trained == 0).sum().item<std::int64_t>();
      const std::int64_t ranks = sirtaki::size();
      if (left > 0) filled = (ranks - left % ranks) % ranks;
      while (const auto batch = sampler.next(kBatch)) {
        const auto ours = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
        const auto all = sirtaki::allgather(ours);
        optimizer.zero_grad();
        const auto loss = torch::mse_loss(net.forward(inputs.index_select(0, ours)),
                                          targets.index_select(0, ours));
        (loss + counter.weight.sum()).backward();
        optimizer.step();
        trained.index_add_(0, all, torch::ones_like(all));
        ++steps;
        if (std::exchange(first, false)) {
          std::printf("goes-on %d %d %" PRId64 " %d %016" PRIx64 "\n", sirtaki::rank(),
                      sirtaki::size(), steps, generation, digest(net));
        }
        if (generations == 0) std::this_thread::sleep_for(kPause);
        if (mode == "steps") state.step();
        if (mode != "steps" || steps % kStepsOfCommit == 0) state.commit();
        leaves.check();
      }
      check(trained, filled);
      ++epoch;
      trained.zero_();
      sampler.set_epoch(static_cast<std::size_t>(epoch));
      state.commit();
      if (sirtaki::rank() == 0) std::printf("epoch %" PRId64 " %d\n", epoch, sirtaki::size());
    }
  };
  sirtaki::elastic::run(state, run);
  counter.check(steps);
  try {
    sirtaki::elastic::run(state, run);
  } catch (const sirtaki::Error& error) {
    std::printf("again: %s\n", error.what());
  }
  std::printf("ends %d %d %" PRId64 " %016" PRIx64 "\n", sirtaki::rank(), sirtaki::size(), steps,
              digest(net));
}

// Rank 1 is lost when all ranks have come here.
void lose_rank_1() {
  sirtaki::barrier();
  if (sirtaki::rank() == 1) std::raise(SIGKILL);
  sirtaki::barrier();
}

// The modes are described in elastic_program.py, "sharded adds another" but here: an optimizer.
void train_sharded(const std::string& enough, const std::string& mode) {
  Exact exact;
  auto optimizer = sirtaki::DistributedOptimizer(
      torch::optim::Adam(exact.parameters(), kRateOfExact), exact.named_parameters(),
      sirtaki::DistributedOptimizerOptions()
          .op(sirtaki::ReduceOp::Sum)
          .shard(mode == "sharded gradients" ? sirtaki::Shard::Gradients
                                             : sirtaki::Shard::OptimizerState)
          .shard_over(mode == "sharded by host" ? sirtaki::ShardOver::Host
                                                : sirtaki::ShardOver::All));
  const std::string plan = sirtaki::memory_plan({100, 100, 200}, 4, 2).text();
  if (plan.find("+ copies of shards") == std::string::npos) throw std::runtime_error(plan);
  sirtaki::DistributedSampler sampler(kSamples);
  std::int64_t epoch = 0;
  auto history = torch::zeros({0, kSamples}, torch::kLong);  // of each step: how often, by sample
  auto state = sirtaki::elastic::State()
                   .model(exact)
                   .optimizer(optimizer)
                   .sampler(sampler)
                   .value("epoch", epoch)
                   .value("history", history)
                   .copy_shards(mode == "sharded alone" ? -1 : kStepsOfCopy);
  const bool is_by_hand = mode == "sharded by hand";
  if (is_by_hand) {
    state.on_change([&state] {
      if (sirtaki::elastic::generation() > 2) state.restore();
    });
  }
  Exact another;
  std::optional<sirtaki::DistributedOptimizer<torch::optim::Adam>> of_another;
  const auto do_by_hand = [&] {
    const std::pair<int, std::int64_t> now(sirtaki::elastic::generation(), history.size(0));
    if (is_by_hand && now == std::pair(1, kStepsOfCopy + 1)) {  // shards are kept as a step ago
      throw sirtaki::elastic::HostsUpdated();
    }
    if (is_by_hand && now == std::pair(2, kStepsOfCopy + 3)) {
      state.sync();
      lose_rank_1();
    }
    if (mode == "sharded adds" && now == std::pair(1, kStepsOfCopy + 1)) {
      optimizer.add_param_group(
          torch::optim::OptimizerParamGroup({torch::zeros({3}, torch::requires_grad())}));
      lose_rank_1();
    }
    if (mode == "sharded adds another" && now == std::pair(1, kStepsOfCopy + 1)) {
      of_another.emplace(
          torch::optim::Adam(another.parameters(), kRateOfExact),
          sirtaki::DistributedOptimizerOptions().shard(sirtaki::Shard::OptimizerState));
      state.optimizer(*of_another, "another");
      lose_rank_1();
    }
  };
  const auto run = [&] {
    const int generation = sirtaki::elastic::generation();
    std::printf("begins %d %d %" PRId64 " %" PRId64 " %d %016" PRIx64 "\n", sirtaki::rank(),
                sirtaki::size(), epoch, history.size(0), generation, digest(exact));
    check_exact(exact, optimizer, history);
    const auto is_enough = [&] {
      return sirtaki::broadcast_object(std::filesystem::exists(enough) ? "yes" : "no", 0) == "yes";
    };
    while (!is_enough()) {
      while (const auto batch = sampler.next(kBatch)) {
        const auto ours = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
        const auto all = sirtaki::allgather(ours);
        optimizer.zero_grad();
        exact.forward(ours).backward();
        optimizer.step();
        const auto counts = torch::zeros({1, kSamples}, torch::kLong);
        counts[0].index_add_(0, all, torch::ones_like(all));
        history = torch::cat({history, counts});
        std::this_thread::sleep_for(kPause);
        do_by_hand();
        state.step();
        if (history.size(0) % kStepsOfCommit != 0) continue;
        state.commit();
        if (!is_by_hand) continue;
        optimizer.zero_grad();
        exact.forward(ours).backward();
        optimizer.step();
        state.restore();
        check_exact(exact, optimizer, history);
      }
      ++epoch;
      sampler.set_epoch(static_cast<std::size_t>(epoch));
      state.commit();
      if (sirtaki::rank() == 0) std::printf("epoch %" PRId64 " %d\n", epoch, sirtaki::size());
    }
  };
  try {
    sirtaki::elastic::run(state, run);
  } catch (const sirtaki::Error& error) {
    const bool ends_all = error.code() == sirtaki::ErrorCode::InvalidArgument;
    if (ends_all && sirtaki::rank() == 0) std::this_thread::sleep_for(kLingers);
    throw;
  }
  check_exact(exact, optimizer, history);
  std::printf("ends %d %d %" PRId64 " %016" PRIx64 "\n", sirtaki::rank(), sirtaki::size(),
              history.size(0), digest(exact));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: elastic_twin FILE [MODE | GENERATIONS]\n");
    return EXIT_FAILURE;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  std::printf("pid %d\n", static_cast<int>(getpid()));
  try {
    sirtaki::init();
    std::printf("device %d\n", sirtaki::local_rank());
    const std::string mode = argc == 3 ? argv[2] : "";
    mode.rfind("sharded", 0) == 0 ? train_sharded(argv[1], mode) : train(argv[1], mode);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elastic_twin: %s\n", error.what());
    if (sirtaki::is_initialized()) sirtaki::abort(error.what());
    return EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return EXIT_SUCCESS;
}
