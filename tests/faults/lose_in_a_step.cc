// lose_in_a_step PLACE SHARD COMMON VICTIM [--sirtaki-…]: trains with a sharded optimizer until rank
// VICTIM kills itself in a step. SHARD: optimizer, gradients. COMMON: common, own: whether the ranks
// of a host have the parameters once.
//
//   before   when the gradients are averaged, before step()
//   meeting  as the ranks meet at the beginning of step()            (with common)
//   moving   as parameters that have got other memory move to common memory (with common)
//   halfway  when its shards are half written
//   stepped  when its shards are written, before the ranks meet again
//   gather   as they meet again
//
// Each rank prints "rank R is process P" first. The others print "rank R after T ms: ERROR", which
// step() has thrown, see to it that the next ones throw as well, and end with code 3 when all have
// told their error. After each step that returns the parameters must be, to the bit, those of an
// optimizer that is not distributed.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "frameworks/torch/session/session_state.h"
#include "session/session.h"
#include "sirtaki/error.h"
#include "sirtaki/optimizer.h"
#include "tests/faults/told.h"

namespace sirtaki::tests {
namespace {

using session::Session;
using Tensors = std::vector<torch::Tensor>;

constexpr int kVictimsStep = 3;

[[noreturn]] void Refuse(const std::string& why) {
  Say(why);
  std::_Exit(2);
}

// The place where this rank kills itself, armed in the victim's last step.
struct Loss {
  // A call of the ranks begins in which this name is.
  void NoteStart(const core::RunBatch& batch) const {
    const auto is_place = [this](const core::RunItem& item) {
      const std::string& name = item.key.name.text();
      return name.find(call) != std::string::npos && (place == "moving") == name.ends_with("/seen");
    };
    if (armed && !call.empty() && std::any_of(batch.items.begin(), batch.items.end(), is_place)) {
      Kill();
    }
  }
  void At(std::string_view here) const {
    if (armed && place == here) Kill();
  }
  [[noreturn]] static void Kill() {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }

  std::string place;
  std::string call;
  std::atomic<bool> armed{false};
};

// LibTorch's Adam, in which a rank can be lost.
class LosingAdam : public torch::optim::Adam {
 public:
  LosingAdam(const Tensors& parameters, const Loss& loss)
      : Adam(parameters, torch::optim::AdamOptions(0.01)), loss_(&loss) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    if (loss_->armed && loss_->place == "halfway") {
      const torch::NoGradGuard no_grad;
      for (auto& group : param_groups()) {
        for (auto& part : group.params()) part.view(-1).narrow(0, 0, part.numel() / 2).fill_(1e30);
      }
      Loss::Kill();
    }
    torch::Tensor result = Adam::step(std::move(closure));
    loss_->At("stepped");
    return result;
  }

 private:
  const Loss* loss_;
};

// One that is cut, one of one rank, and one that travels alone where each rank has its parameters.
Tensors MakeParameters() {
  Tensors parameters;
  for (const std::int64_t count : {300'000, 20, 3'000}) {
    parameters.push_back(torch::linspace(-1, 1, count).requires_grad_(true));
  }
  return parameters;
}

// The gradient of each element is a whole number, so that sums are exact.
float SlopeOf(int rank, int step) { return static_cast<float>((rank + 1) * (step % 5 - 2)); }

bool SameBits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
    return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
  });
}

// Returns what it throws.
std::string ErrorOf(const std::string& what, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  Refuse("WRONG: " + what + " does not throw");
}

class Training {
 public:
  Training(const DistributedOptimizerOptions& options, const session::Topology& topology,
           Loss& loss)
      : topology_(topology),
        loss_(loss),
        optimizer_(LosingAdam(parameters_, loss), Named(), options),
        expected_(expected_parameters_, torch::optim::AdamOptions(0.01)) {}

  // Until a step throws.
  void Run(int victim) {
    for (int step = 0;; ++step) {
      optimizer_.zero_grad();
      Backward(step);
      loss_.armed = topology_.rank == victim && step == kVictimsStep;
      if (loss_.place == "moving" && step == kVictimsStep) {
        for (const auto& parameter : parameters_) parameter.set_data(parameter.detach().clone());
      }
      loss_.At("before");
      const auto begin = core::Clock::now();
      try {
        optimizer_.step();
      } catch (const Error& error) {
        const auto time =
            std::chrono::duration_cast<std::chrono::milliseconds>(core::Clock::now() - begin);
        Say("rank " + std::to_string(topology_.rank) + " after " + std::to_string(time.count()) +
            " ms: " + error.what());
        return;
      }
      ExpectedStep(step);
      if (!SameBits(parameters_, expected_parameters_)) {
        Refuse("WRONG parameters after step " + std::to_string(step));
      }
    }
  }

  // Nobody goes on without an error, nor is the memory of the parameters gone.
  void GoOn(const std::string& lost) {
    const auto expect_lost = [&](const std::string& what, const std::function<void()>& call) {
      const std::string error = ErrorOf(what, call);
      if (error.find(lost) == std::string::npos) Refuse("WRONG: " + what + ": " + error);
    };
    expect_lost("the next step()", [this] { optimizer_.step(); });
    expect_lost("the step() after that", [this] { optimizer_.step(); });
    expect_lost("a whole step", [this] {
      optimizer_.zero_grad();
      Backward(0);
      optimizer_.step();
    });
    for (const auto& parameter : parameters_) (void)parameter.sum().item<float>();
  }

 private:
  NamedTensors Named() const {
    NamedTensors named;
    for (const auto& parameter : parameters_) {
      named.emplace_back("p" + std::to_string(named.size()), parameter);
    }
    return named;
  }

  void Backward(int step) {
    torch::Tensor sum = torch::zeros({});
    for (const auto& parameter : parameters_) sum = sum + parameter.sum();
    (sum * SlopeOf(topology_.rank, step)).backward();
  }

  void ExpectedStep(int step) {
    float slope = 0;
    for (int rank = 0; rank < topology_.size; ++rank) slope += SlopeOf(rank, step);
    for (auto& parameter : expected_parameters_) {
      parameter.mutable_grad() = torch::full_like(parameter, slope);
    }
    expected_.step();
  }

  const session::Topology topology_;
  Loss& loss_;
  const Tensors parameters_ = MakeParameters();
  Tensors expected_parameters_ = MakeParameters();
  DistributedOptimizer<LosingAdam> optimizer_;
  torch::optim::Adam expected_;
};

int Run(int argc, char** argv) {
  if (argc < 5) {
    Refuse("usage: lose_in_a_step PLACE SHARD COMMON VICTIM [--sirtaki-option=value]...");
  }
  Loss loss;
  loss.place = argv[1];
  if (loss.place == "meeting" || loss.place == "moving") loss.call = "where the parameters";
  if (loss.place == "gather") loss.call = "the shards of the parameters";
  const bool of_gradients = std::string_view(argv[2]) == "gradients";
  const bool common = std::string_view(argv[3]) == "common";
  const int victim = std::atoi(argv[4]);
  session::StartOptions options;
  options.parsed = core::ParseConfig(std::vector<std::string>(argv + 5, argv + argc),
                                     options.environment, {}, &options.config, nullptr);
  options.on_start = [&loss](const core::RunBatch& batch) { loss.NoteStart(batch); };
  std::shared_ptr<Session> session;
  if (const core::Status status = Session::CreateOfProcess(options, &session); !status.ok()) {
    Refuse("init: " + status.ToString());
  }
  session::SetDefaultSession(session);
  const session::Topology& topology = session->topology();
  Say("rank " + std::to_string(topology.rank) + " is process " + std::to_string(getpid()));
  torch::set_num_threads(1);
  {
    const detail::SessionScope scope(std::make_shared<detail::SessionState>(session));
    Training training(DistributedOptimizerOptions()
                          .op(ReduceOp::Sum)
                          .shard(of_gradients ? Shard::Gradients : Shard::OptimizerState)
                          .shard_by(ShardBy::Element)
                          .share_parameters(common),
                      topology, loss);
    training.Run(victim);
    training.GoOn("rank " + std::to_string(victim) + " is lost");
  }
  if (session->Shutdown("done").ok()) Refuse("WRONG: a shutdown without a fault");
  AwaitTheOthers(static_cast<std::uintmax_t>(topology.size - 1));
  return 3;
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) { return sirtaki::tests::Run(argc, argv); }
