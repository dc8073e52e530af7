// Random training programs, by seed: a model of random parts, optimizers of random groups, and in
// each step some of the habits that programs have. The same program is trained with shards and
// without, and what all ranks have after each step is compared, to the bit.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "session/inproc/inproc_world.h"
#include "sirtaki/broadcast.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/gradients/training_habits.h"
#include "tests/torch/training.h"

namespace sirtaki::tests::random_training {

using Tensors = std::vector<torch::Tensor>;
using torch::optim::OptimizerParamGroup;

// Draws are the same on every machine, which those of std::uniform_int_distribution are not.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}
  int Below(int end) { return static_cast<int>(random_() % static_cast<std::uint64_t>(end)); }
  int In(int first, int last) { return first + Below(last - first + 1); }
  bool OneIn(int n) { return Below(n) == 0; }
  template <class T>
  T Of(std::initializer_list<T> of) {
    return of.begin()[Below(static_cast<int>(of.size()))];
  }

 private:
  std::mt19937_64 random_;
};

// ---- what is drawn ----

enum class Layer : std::uint8_t {
  kLinear,
  kNorm,
  kEmbedding,
  kTied,       // an embedding that is the last matrix as well
  kImages,     // channels last, with gradients that are not
  kColumns,    // a transposed matrix
  kLarge,      // more than travels with others
  kOneNumber,  // without a dimension; its gradient is one number for all elements of another
  kSometimes,  // on some ranks, in some steps
  kUnused,
  kEmpty,
  kFrozen,
};

enum class Kind : std::uint8_t {
  kSgd,
  kAdam,
  kAdamW,
  kAdagrad,
  kRmsProp,
  kOwnAdam,        // a class of the program's, which gets whole parameters
  kOwnOfMatrices,  // looks at whole matrices
  kOwnByElement,   // says that it may get parts
  kReplacing,      // gives its parameters other memory
};

// Options of a group; what they mean depends on the optimizer.
struct Group {
  double lr = 1;  // times that of the kind
  double decay = 0;
  bool a = false;
  bool b = false;
};

struct Part {
  Layer layer = Layer::kLinear;
  torch::ScalarType type = torch::kFloat;
  std::int64_t size = 1;
  int group = 0;
};

enum class Zero : std::uint8_t { kToNone, kInPlace, kOfModel, kOfModelInPlace, kNot };
enum class Clip : std::uint8_t { kNone, kTwo, kInfinity, kNever };
enum class Write : std::uint8_t {
  kClamp,
  kData,     // by detach()
  kRaw,      // by its address, one element
  kSwap,     // averaged weights come, are used and go
  kAverage,  // averaged weights come and stay
  kNewMemory,
  kNewMemoryOnOneRank,
  kLoad,  // what was saved is read back
};

struct Step {
  Zero zero = Zero::kToNone;
  int passes = 1;
  bool hold_last = false;  // also the last pass is in no_sync()
  bool closure = false;
  bool left_out = false;
  Clip clip = Clip::kNone;
  bool halves_gradients = false;
  bool infinite = false;
  bool adds = false;  // a parameter
  bool saves = false;
  bool loads = false;  // what was saved last,
  bool anew = false;   // into another model and optimizer
  bool broadcasts = false;
  bool evaluates = false;
  double lr = 1;                              // times what it was
  std::vector<int> switched;                  // parts that are frozen, or unfrozen
  std::vector<std::pair<Write, int>> writes;  // and the part; -1: all of them
};

struct Program {
  explicit Program(std::uint64_t of_seed);
  std::string ToString() const;
  // What both runs have, and what only the sharded one has.
  DistributedOptimizerOptions Options(bool sharded) const;

  std::uint64_t seed;
  int size = 2;
  std::vector<int> host_of_rank;
  session::InprocWorld::Sharing sharing = session::InprocWorld::Sharing::kNone;
  core::Config config = habits::Deterministic();

  Shard shard = Shard::OptimizerState;
  ShardOver over = ShardOver::All;
  bool by_parameter = false;
  bool common = true;
  // Each rank writes other numbers to its parameters. Then copies of the shards are what common
  // parameters are compared with.
  bool own_numbers = false;
  DistributedOptimizerOptions options;

  std::int64_t width = 4;
  std::vector<Part> parts;
  bool is_flat = false;  // parameters are parts of one tensor
  Kind kind = Kind::kSgd;
  std::vector<Group> groups;
  bool two = false;  // optimizers, of one half of the groups each
  bool scales = false;
  std::vector<Step> steps;
};

inline bool IsOwn(Kind kind) { return kind >= Kind::kOwnAdam; }

inline Program::Program(std::uint64_t of_seed) : seed(of_seed) {
  using torch::ScalarType;
  Draw draw(seed);
  size = draw.In(1, 7);
  size = size > 4 ? size - 3 : size;  // 1 less often
  if (draw.OneIn(3)) {
    for (int rank = 0; rank < size; ++rank) host_of_rank.push_back(draw.Below(2));
  }
  using Sharing = session::InprocWorld::Sharing;
  sharing = draw.Of({Sharing::kNone, Sharing::kDirect, Sharing::kStaged, Sharing::kPooled});
  config.bucket_bytes = draw.Of<std::int64_t>({0, 1, 400, 4096, config.bucket_bytes});
  config.first_bucket_bytes = draw.Of<std::int64_t>({1, 400, config.first_bucket_bytes});
  config.small_bytes = draw.Of<std::int64_t>({0, 64, config.small_bytes});
  using Arena = core::GradientArenaMode;
  config.gradient_arena = draw.Of({Arena::kAuto, Arena::kPlain, Arena::kOff});
  if (draw.OneIn(8)) config.shared_memory = core::SharedMemoryMode::kOff;

  shard = draw.Of({Shard::OptimizerState, Shard::Gradients});
  const bool of_gradients = shard == Shard::Gradients;
  over = draw.OneIn(3) ? ShardOver::Host : ShardOver::All;
  by_parameter = draw.OneIn(6);
  own_numbers = draw.OneIn(5);
  common = own_numbers || !draw.OneIn(3);

  kind = static_cast<Kind>(draw.Below(9));
  if (IsOwn(kind) && draw.OneIn(2)) kind = static_cast<Kind>(draw.Below(5));
  options.fused(!IsOwn(kind) && kind != Kind::kRmsProp && draw.OneIn(2));
  options.average_at(draw.OneIn(3) ? Average::Step : Average::Backward);
  if (draw.OneIn(8)) options.op(ReduceOp::Sum);
  if (draw.OneIn(6)) {
    options.compression(draw.Of({Compression::F16, Compression::BF16}))
        .compression_scope(draw.Of({CompressionScope::BetweenHosts, CompressionScope::Everywhere}));
  }
  if (options.op() == ReduceOp::Average && draw.OneIn(6)) options.gradient_predivide_factor(1.5);
  if (draw.OneIn(5)) options.backward_passes_per_step(draw.In(2, 3));
  if (draw.OneIn(6)) options.check_parameters_every(own_numbers ? 0 : draw.In(1, 2));
  const bool adds_up = options.op() == ReduceOp::Average &&
                       options.compression() == Compression::None &&
                       options.average_at() == Average::Backward && !of_gradients;

  width = draw.In(2, 40);
  const ScalarType half = draw.Of({torch::kHalf, torch::kBFloat16});
  const std::vector<ScalarType> types =
      draw.Of<std::vector<ScalarType>>({{torch::kFloat},
                                        {torch::kDouble},
                                        {torch::kFloat, torch::kDouble},
                                        {torch::kFloat, half},
                                        {half, torch::kDouble, torch::kFloat}});
  scales = draw.OneIn(5);
  for (int i = draw.In(1, 3); i > 0; --i) {
    groups.push_back(
        {draw.Of({1.0, 0.5, 2.0}), draw.Of({0.0, 0.01}), draw.OneIn(2), draw.OneIn(2)});
  }
  two = groups.size() > 1 && draw.OneIn(3);
  const int count = draw.In(2, 7);
  for (int i = 0; i < count; ++i) {
    Part part;
    part.layer = static_cast<Layer>(i == 0 ? 0 : draw.Below(12));
    part.type = types[static_cast<std::size_t>(draw.Below(static_cast<int>(types.size())))];
    if (scales && part.type == torch::kHalf) part.type = torch::kFloat;
    part.size = part.layer == Layer::kLarge ? draw.In(8000, 20000) : draw.In(1, 60);
    part.group = draw.Below(static_cast<int>(groups.size()));
    parts.push_back(part);
  }
  // A group, and an optimizer, has something to do.
  for (std::size_t g = 0; g < groups.size(); ++g) {
    parts.push_back({Layer::kColumns, types.front(), draw.In(1, 70), static_cast<int>(g)});
    if (scales && parts.back().type == torch::kHalf) parts.back().type = torch::kFloat;
  }
  is_flat = draw.OneIn(8);

  bool saved = false;
  const int last = draw.In(4, 9);
  for (int s = 0; s < last; ++s) {
    Step step;
    step.zero = static_cast<Zero>(draw.OneIn(2) ? 0 : draw.Below(5));
    if (step.zero == Zero::kNot && (!adds_up || scales)) step.zero = Zero::kToNone;
    if (draw.OneIn(3)) step.passes = draw.In(1, 3);
    step.passes = std::min(step.passes, std::max(2, options.backward_passes_per_step()));
    step.hold_last = draw.OneIn(10);
    step.closure = !two && !scales && !step.hold_last && draw.OneIn(5);
    step.left_out = !step.closure && !scales && draw.OneIn(10);
    if (draw.OneIn(4)) step.clip = static_cast<Clip>(draw.Below(4));
    if (of_gradients && step.clip == Clip::kTwo) step.clip = Clip::kInfinity;
    step.halves_gradients = !of_gradients && !step.closure && draw.OneIn(8);
    step.infinite = scales && draw.OneIn(4);
    // LibTorch's Adagrad steps parameters only that it was made with.
    step.adds = s > 0 && (kind != Kind::kAdagrad || options.fused()) && draw.OneIn(10);
    step.saves = s > 0 && draw.OneIn(8);
    step.loads = saved && draw.OneIn(4);
    step.anew = draw.OneIn(2);
    saved = saved || step.saves;
    step.broadcasts = !own_numbers && draw.OneIn(8);
    step.evaluates = draw.OneIn(3);
    if (draw.OneIn(4)) step.lr = draw.Of({0.5, 0.9, 1.5});
    if (draw.OneIn(4)) step.switched.push_back(draw.Below(count));
    if (own_numbers || draw.OneIn(2)) {
      for (int i = draw.In(1, 2); i > 0; --i) {
        step.writes.push_back({static_cast<Write>(draw.Below(8)),
                               draw.OneIn(2) ? -1 : draw.Below(static_cast<int>(parts.size()))});
      }
    }
    steps.push_back(step);
  }
  // The sum of two has the same bits in any order.
  if (size == 2) config.deterministic = draw.OneIn(2);
}

inline DistributedOptimizerOptions Program::Options(bool sharded) const {
  DistributedOptimizerOptions of = options;
  if (!sharded && !own_numbers) return of;
  of.shard(shard).shard_over(over).share_parameters(common && sharded);
  if (by_parameter) of.shard_by(ShardBy::Parameter);
  if (kind == Kind::kOwnByElement || kind == Kind::kReplacing) of.shard_by(ShardBy::Element);
  return of;
}

// For whoever looks for what is wrong with one of them.
inline std::string Program::ToString() const {
  static const char* const kKinds[] = {"SGD",      "Adam",     "AdamW",           "Adagrad",
                                       "RMSprop",  "own Adam", "own of matrices", "own by element",
                                       "replacing"};
  static const char* const kLayers[] = {"linear",    "norm",    "embedding", "tied",
                                        "images",    "columns", "large",     "one number",
                                        "sometimes", "unused",  "empty",     "frozen"};
  std::ostringstream out;
  out << size << " ranks, hosts";
  for (const int host : host_of_rank) out << ' ' << host;
  out << ", sharing " << static_cast<int>(sharing) << ", buckets " << config.bucket_bytes << ' '
      << config.first_bucket_bytes << ", small " << config.small_bytes << ", arena "
      << static_cast<int>(config.gradient_arena) << ", shared memory "
      << static_cast<int>(config.shared_memory) << "\n  shard " << static_cast<int>(shard)
      << ", over " << static_cast<int>(over) << (by_parameter ? ", by parameter" : "")
      << (common ? ", common" : "") << (own_numbers ? ", own numbers" : "") << "\n  "
      << kKinds[static_cast<int>(kind)] << (options.fused() ? ", fused" : "")
      << (two ? ", two optimizers" : "") << (scales ? ", scaled" : "") << (is_flat ? ", flat" : "")
      << (options.average_at() == Average::Step ? ", at step" : "")
      << (options.op() == ReduceOp::Sum ? ", sum" : "") << ", compression "
      << static_cast<int>(options.compression()) << ", passes "
      << options.backward_passes_per_step() << ", checks " << options.check_parameters_every()
      << ", predivide " << options.gradient_predivide_factor() << "\n  groups";
  for (const Group& g : groups) {
    out << " (" << g.lr << ' ' << g.decay << (g.a ? " a" : "") << (g.b ? " b" : "") << ')';
  }
  out << "; width " << width << ", parts";
  for (const Part& part : parts) {
    out << ' ' << kLayers[static_cast<int>(part.layer)] << '(' << part.type << ' ' << part.size
        << " of " << part.group << ')';
  }
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Step& step = steps[s];
    out << "\n  step " << s << ": zero " << static_cast<int>(step.zero) << ", passes "
        << step.passes << (step.hold_last ? ", hold" : "") << (step.closure ? ", closure" : "")
        << (step.left_out ? ", left out" : "") << ", clip " << static_cast<int>(step.clip)
        << (step.halves_gradients ? ", halves" : "") << (step.infinite ? ", infinite" : "")
        << (step.adds ? ", adds" : "") << (step.loads ? step.anew ? ", loads anew" : ", loads" : "")
        << (step.saves ? ", saves" : "") << (step.broadcasts ? ", broadcasts" : "")
        << (step.evaluates ? ", evaluates" : "") << ", lr " << step.lr;
    for (const int part : step.switched) out << ", switches " << part;
    for (const auto& [write, part] : step.writes) {
      out << ", write " << static_cast<int>(write) << " of " << part;
    }
  }
  return out.str();
}

// ---- the model ----

struct Net : torch::nn::Module {
  explicit Net(const Program& of) : program(of) {
    for (std::size_t i = 0; i < of.parts.size(); ++i) tensors.push_back(Make(i));
    if (of.is_flat) Flatten();
  }

  Tensors Make(std::size_t i) {
    const Part& part = program.parts[i];
    const std::int64_t w = program.width;
    const std::int64_t n = part.size;
    const double phase = static_cast<double>(program.seed % 1000) + 10.0 * static_cast<double>(i);
    const auto put = [&](const std::string& name, torch::Tensor tensor, bool grad = true) {
      return register_parameter(name + std::to_string(i), (0.3 * tensor).to(part.type), grad);
    };
    switch (part.layer) {
      case Layer::kLinear:
        return {put("in", Waves({w, n}, phase)), put("bias", Waves({n}, phase + 1)),
                put("out", Waves({n, w}, phase + 2))};
      case Layer::kNorm:
        return {put("scale", 1 + Waves({w}, phase)), put("shift", Waves({w}, phase + 1))};
      case Layer::kEmbedding:
      case Layer::kTied:
        return {put("embedding", Waves({n, w}, phase))};
      case Layer::kImages:
        return {register_parameter("images" + std::to_string(i),
                                   (0.3 * Waves({3, n, 2, 3}, phase))
                                       .to(part.type)
                                       .contiguous(torch::MemoryFormat::ChannelsLast))};
      case Layer::kColumns:
        return {register_parameter("columns" + std::to_string(i),
                                   (0.3 * Waves({w, n}, phase)).to(part.type).t())};
      case Layer::kOneNumber:
        return {put("number", Waves({}, phase)), put("all", Waves({n}, phase + 1))};
      case Layer::kFrozen:
        return {put("frozen", Waves({n}, phase), false)};
      case Layer::kEmpty:
        return {put("empty", torch::zeros({0, n}, torch::kDouble))};
      default:
        return {put("flat", Waves({n}, phase))};
    }
  }

  // Parts of one tensor for each type, as programs have them that reduce all at once.
  void Flatten() {
    const torch::NoGradGuard no_grad;
    std::map<torch::ScalarType, Tensors> of_type;
    for (const torch::Tensor& tensor : parameters()) {
      if (tensor.is_contiguous()) of_type[tensor.scalar_type()].push_back(tensor);
    }
    for (const auto& [type, list] : of_type) {
      Tensors copies;
      for (const torch::Tensor& tensor : list) copies.push_back(tensor.detach().reshape(-1));
      const torch::Tensor flat = torch::cat(copies);
      std::int64_t begin = 0;
      for (torch::Tensor tensor : list) {
        tensor.set_data(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
        begin += tensor.numel();
      }
    }
  }

  // Behind the program's own parts, without a layer of its own.
  torch::Tensor Add(int number) {
    added.push_back(register_parameter(
        "added" + std::to_string(number),
        (0.3 * Waves({3 + 17 * number}, number)).to(program.parts.front().type)));
    return added.back();
  }

  torch::Tensor Loss(int rank, int step, int pass) {
    const double phase = 100.0 * step + 10.0 * rank + 3.0 * pass;
    const auto number = [&](const torch::Tensor& tensor) {
      return (tensor * Waves(tensor.sizes(), phase + 1).to(tensor.dtype()))
                 .sum()
                 .to(torch::kDouble) /
             static_cast<double>(1 + tensor.numel());
    };
    torch::Tensor x = Waves({5, program.width}, phase);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Part& part = program.parts[i];
      const Tensors& p = tensors[i];
      const torch::Tensor h = x.to(part.type);
      torch::Tensor y;
      switch (part.layer) {
        case Layer::kLinear:
          y = torch::matmul(torch::tanh(torch::matmul(h, p[0]) + p[1]), p[2]);
          break;
        case Layer::kNorm:
          y = torch::layer_norm(h, {program.width}, p[0], p[1]);
          break;
        case Layer::kColumns:
          y = torch::matmul(torch::sigmoid(torch::matmul(h, p[0].t())), p[0]) /
              static_cast<double>(part.size);
          break;
        case Layer::kEmbedding:
        case Layer::kTied: {
          const auto rows = (torch::arange(5) * 7 + rank + step) % part.size;
          y = torch::embedding(p[0], rows);
          if (part.layer == Layer::kTied) {
            y = torch::matmul(torch::tanh(torch::matmul(h + y, p[0].t())), p[0]) /
                static_cast<double>(part.size);
          }
          break;
        }
        case Layer::kOneNumber:
          y = h * p[0] + p[1].mean();
          break;
        case Layer::kSometimes:
          if ((step + rank) % 2 == 0 || step % 4 == 3) continue;
          y = h * number(p[0]).to(part.type);
          break;
        case Layer::kUnused:
          continue;
        default:
          y = h * (1 + number(p[0]).to(part.type));
      }
      x = torch::tanh(x + y.to(torch::kDouble));
    }
    for (const torch::Tensor& tensor : added) x = x * (1 + number(tensor));
    return torch::mse_loss(x, Waves(x.sizes(), phase + 5));
  }

  const Program& program;
  std::vector<Tensors> tensors;  // by part
  Tensors added;
};

// ---- optimizers ----

struct OwnAdam : torch::optim::Adam {
  using Adam::Adam;
};

template <class Change>
void StepEach(torch::optim::Optimizer& optimizer, const Change& change) {
  const torch::NoGradGuard no_grad;
  for (auto& group : optimizer.param_groups()) {
    for (torch::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) change(parameter, group.options().get_lr());
    }
  }
}

inline torch::Tensor LossOf(const torch::optim::Optimizer::LossClosure& closure) {
  const at::AutoGradMode grad(true);
  return closure ? closure() : torch::Tensor();
}

struct OfMatrices : torch::optim::SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure) override {
    torch::Tensor loss = LossOf(closure);
    StepEach(*this, [](torch::Tensor& parameter, double lr) {
      const torch::Tensor norm = parameter.grad().norm();
      parameter.sub_(parameter.grad() / (1 + norm), lr);
    });
    return loss;
  }
};

struct ByElement : torch::optim::SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure) override {
    torch::Tensor loss = LossOf(closure);
    StepEach(*this, [](torch::Tensor& parameter, double lr) {
      parameter.sub_(parameter.grad().sign() + 0.1 * parameter, lr);
    });
    return loss;
  }
};

struct Replacing : torch::optim::SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure closure) override {
    torch::Tensor loss = LossOf(closure);
    StepEach(*this, [](torch::Tensor& parameter, double lr) {
      parameter.set_data(parameter.detach().clone().sub_(parameter.grad(), lr));
    });
    return loss;
  }
};

inline std::unique_ptr<torch::optim::OptimizerOptions> OptionsOf(Kind kind, const Group& g) {
  namespace optim = torch::optim;
  // In half types squares of small gradients are zeros.
  constexpr double kEps = 1e-3;
  switch (kind) {
    case Kind::kAdam:
    case Kind::kOwnAdam: {
      auto options = std::make_unique<optim::AdamOptions>(0.01 * g.lr);
      options->weight_decay(g.decay).amsgrad(g.a).eps(kEps);
      if (g.b) options->betas({0.8, 0.95});
      return options;
    }
    case Kind::kAdamW: {
      auto options = std::make_unique<optim::AdamWOptions>(0.01 * g.lr);
      options->weight_decay(g.decay).amsgrad(g.a).eps(kEps);
      if (g.b) options->betas({0.8, 0.95});
      return options;
    }
    case Kind::kAdagrad: {
      auto options = std::make_unique<optim::AdagradOptions>(0.03 * g.lr);
      options->weight_decay(g.decay).lr_decay(g.a ? 0.01 : 0).eps(kEps);
      if (g.b) options->initial_accumulator_value(0.1);
      return options;
    }
    case Kind::kRmsProp: {
      auto options = std::make_unique<optim::RMSpropOptions>(0.01 * g.lr);
      options->weight_decay(g.decay).centered(g.a).momentum(g.b ? 0.9 : 0).eps(kEps);
      return options;
    }
    default: {
      auto options = std::make_unique<optim::SGDOptions>(0.05 * g.lr);
      options->weight_decay(g.decay);
      if (g.a) options->momentum(0.9).nesterov(g.b).dampening(g.b ? 0 : 0.1);
      return options;
    }
  }
}

inline habits::AnyOptimizer MakeOptimizer(const Program& program,
                                          std::vector<OptimizerParamGroup> groups,
                                          const torch::nn::Module& net,
                                          const DistributedOptimizerOptions& options) {
  namespace optim = torch::optim;
  const auto wrap = [&](auto base) {
    return habits::Distributed(std::move(base), net, habits::Habit::kPlain, options);
  };
  switch (program.kind) {
    case Kind::kSgd:
      return wrap(optim::SGD(std::move(groups), optim::SGDOptions(0.1)));
    case Kind::kAdam:
      return wrap(optim::Adam(std::move(groups)));
    case Kind::kAdamW:
      return wrap(optim::AdamW(std::move(groups)));
    case Kind::kAdagrad:
      return wrap(optim::Adagrad(std::move(groups)));
    case Kind::kRmsProp:
      return wrap(optim::RMSprop(std::move(groups)));
    case Kind::kOwnAdam:
      return wrap(OwnAdam(std::move(groups)));
    case Kind::kOwnOfMatrices:
      return wrap(OfMatrices(std::move(groups), optim::SGDOptions(0.1)));
    case Kind::kOwnByElement:
      return wrap(ByElement(std::move(groups), optim::SGDOptions(0.1)));
    case Kind::kReplacing:
      return wrap(Replacing(std::move(groups), optim::SGDOptions(0.1)));
  }
  throw std::logic_error("no such optimizer");
}

// ---- a run of it on a rank ----

// What a rank has seen: losses, and after each step the parameters.
struct Seen {
  std::string what;
  torch::Tensor tensor;
};

class Run {
 public:
  // `file`: of its checkpoints, the same on all ranks.
  Run(const Program& program, int rank, bool sharded, std::string file)
      : program_(program), rank_(rank), sharded_(sharded), file_(std::move(file)) {
    for (const Part& part : program.parts) is_frozen_.push_back(part.layer == Layer::kFrozen);
    Begin();
  }

  const std::vector<Seen>& Train() {
    for (std::size_t s = 0; s < program_.steps.size(); ++s) {
      const Step& step = program_.steps[s];
      Change(step);
      if (step.loads) Load(step.anew);
      MakeStep(step, static_cast<int>(s));
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : net_->named_parameters()) {
        Note("parameter " + parameter.key() + " after step " + std::to_string(s),
             parameter.value());
      }
      // Others may still be in their step.
      if (step.evaluates) Note("evaluation", net_->Loss(rank_, 50, 0));
      for (const auto& [write, part] : step.writes) WriteTo(write, part);
      if (step.saves) save_checkpoint(file_, ToSave());
    }
    return seen_;
  }

 private:
  void Note(std::string what, const torch::Tensor& tensor) {
    seen_.push_back({std::move(what), tensor.detach().clone()});
  }

  void Begin() {
    net_ = std::make_shared<Net>(program_);
    for (int i = 0; i < added_; ++i) net_->Add(i);
    ApplyFrozen();
    std::vector<std::vector<OptimizerParamGroup>> of_optimizer(program_.two ? 2 : 1);
    for (std::size_t g = 0; g < program_.groups.size(); ++g) {
      Tensors parameters;
      for (std::size_t i = 0; i < net_->tensors.size(); ++i) {
        if (program_.parts[i].group != static_cast<int>(g)) continue;
        for (const torch::Tensor& tensor : net_->tensors[i]) parameters.push_back(tensor);
      }
      of_optimizer[g % of_optimizer.size()].push_back(
          {parameters, OptionsOf(program_.kind, program_.groups[g])});
    }
    for (const torch::Tensor& tensor : net_->added) of_optimizer[0].push_back(AddedGroup(tensor));
    optimizers_.clear();
    for (auto& groups : of_optimizer) {
      optimizers_.push_back(
          MakeOptimizer(program_, std::move(groups), *net_, program_.Options(sharded_)));
    }
    averaged_.clear();
    for (const torch::Tensor& parameter : net_->parameters()) {
      averaged_.push_back(parameter.detach().clone());
    }
  }

  OptimizerParamGroup AddedGroup(const torch::Tensor& tensor) const {
    return {{tensor}, OptionsOf(program_.kind, program_.groups.front())};
  }

  void ApplyFrozen() {
    for (std::size_t i = 0; i < net_->tensors.size(); ++i) {
      for (torch::Tensor& tensor : net_->tensors[i]) tensor.set_requires_grad(!is_frozen_[i]);
    }
  }

  // What happens between two steps to the model and the optimizer.
  void Change(const Step& step) {
    for (const int part : step.switched) {
      is_frozen_[static_cast<std::size_t>(part)] = !is_frozen_[static_cast<std::size_t>(part)];
    }
    ApplyFrozen();
    if (step.adds) {
      const torch::Tensor tensor = net_->Add(added_++);
      optimizers_[0].base->add_param_group(AddedGroup(tensor));
      averaged_.push_back(tensor.detach().clone());
    }
    for (habits::AnyOptimizer& optimizer : optimizers_) {
      for (auto& group : optimizer.base->param_groups()) {
        group.options().set_lr(group.options().get_lr() * step.lr);
      }
      if (step.broadcasts) broadcast_optimizer_state(*optimizer.base, 0);
    }
    if (step.broadcasts) broadcast_parameters(*net_, program_.size - 1);
  }

  Checkpoint ToSave() {
    Checkpoint checkpoint;
    checkpoint.model(*net_);
    for (std::size_t i = 0; i < optimizers_.size(); ++i) {
      checkpoint.optimizer(*optimizers_[i].base, "optimizer " + std::to_string(i));
    }
    if (program_.scales) checkpoint.object("scaler", scaler_);
    return checkpoint.value("added", added_then_ = added_);
  }

  void Load(bool anew) {
    // A parameter that came later is not in the file.
    if (added_ != added_then_) return;
    const auto before = std::pair(net_, optimizers_);
    if (anew) Begin();
    // LibTorch adds what it loads to the state that there is.
    for (const habits::AnyOptimizer& optimizer : optimizers_) {
      if (program_.Options(sharded_).shard() == Shard::None) optimizer.base->state().clear();
    }
    if (!load_checkpoint(file_, ToSave())) throw std::runtime_error("there is no " + file_);
  }

  void ZeroGrad(Zero zero) {
    // Gradients that are kept in shards are gone after a step: nothing is there that could be zero.
    const bool keeps_none = program_.shard == Shard::Gradients && program_.size > 1;
    const bool to_none =
        zero == Zero::kToNone || zero == Zero::kOfModel || (keeps_none && !sharded_);
    if (zero == Zero::kNot) return;
    if (zero == Zero::kOfModel || zero == Zero::kOfModelInPlace) {
      net_->zero_grad(to_none);
    } else {
      for (const auto& optimizer : optimizers_) optimizer.zero_grad(to_none);
    }
  }

  // The passes of a step. Gradients are those of all ranks afterwards, if they are not held.
  torch::Tensor Passes(const Step& step, int s) {
    ZeroGrad(step.zero);
    torch::Tensor sum;
    for (int pass = 0; pass < step.passes; ++pass) {
      std::vector<std::shared_ptr<void>> held;
      const bool is_last = pass + 1 == step.passes;
      if (is_last ? step.hold_last : program_.options.backward_passes_per_step() == 1) {
        for (const auto& optimizer : optimizers_) held.push_back(optimizer.no_sync());
      }
      torch::Tensor loss = net_->Loss(rank_, s, pass);
      Note("loss of step " + std::to_string(s), loss);
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
      if (step.infinite && rank_ == s % program_.size) loss = loss * INFINITY;
      (program_.scales ? scaler_.scale(loss) : loss).backward();
    }
    return sum;
  }

  void ClipAll(Clip clip) {
    for (const habits::AnyOptimizer& optimizer : optimizers_) {
      if (program_.scales) scaler_.unscale_(*optimizer.base);
      const double norm =
          clip == Clip::kNever
              ? clip_grad_norm_(*optimizer.base, 1e30)
              : clip_grad_norm_(*optimizer.base, 0.05, clip == Clip::kTwo ? 2.0 : INFINITY);
      // The norm of shards is added up in another order.
      if (clip != Clip::kNever) Note("norm", torch::tensor({norm}, torch::kDouble));
    }
  }

  void MakeStep(const Step& step, int s) {
    if (step.closure) {
      const torch::Tensor loss = optimizers_[0].base->step([&] {
        const torch::Tensor of_rank = Passes(step, s);
        if (step.clip != Clip::kNone) ClipAll(step.clip);
        return of_rank;
      });
      return Note("mean loss of step " + std::to_string(s), loss);
    }
    Passes(step, s);
    if (step.clip != Clip::kNone) ClipAll(step.clip);
    for (const habits::AnyOptimizer& optimizer : optimizers_) {
      detail::GradientReducer& reducer = *detail::ReducerOf(*optimizer.base);
      // step() would average all gradients again for one that was added, with other last bits.
      if (step.halves_gradients || step.left_out || step.adds) {
        reducer.Synchronize(*optimizer.base);
      }
      if (step.halves_gradients) {
        for (auto& group : optimizer.base->param_groups()) {
          for (const torch::Tensor& parameter : group.params()) {
            if (parameter.grad().defined()) parameter.grad().mul_(0.5);
          }
        }
      }
      if (step.left_out) {
        reducer.SkipStep();
      } else if (program_.scales) {
        Note("made", torch::tensor({scaler_.step(*optimizer.base)}));
      } else {
        optimizer.base->step();
      }
    }
    if (program_.scales) scaler_.update();
  }

  void WriteTo(Write write, int part) {
    const torch::NoGradGuard no_grad;
    const double number = 1 + (program_.own_numbers ? 0.01 * rank_ : 0);
    const auto parameters = net_->parameters();
    std::size_t first = 0;
    for (int i = 0; i < part; ++i) first += net_->tensors[static_cast<std::size_t>(i)].size();
    const std::size_t end =
        part < 0 ? parameters.size() : first + net_->tensors[static_cast<std::size_t>(part)].size();
    // Averaged weights are of all steps.
    Tensors copies;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      averaged_[i].mul_(0.5).add_(parameters[i], 0.5);
      copies.push_back(parameters[i].clone());
    }
    std::stringstream saved;
    if (write == Write::kLoad) torch::save(net_, saved);
    for (std::size_t i = first; i < end; ++i) {
      torch::Tensor p = parameters[i];
      switch (write) {
        case Write::kClamp:
          p.clamp_(-0.2 * number, 0.2 * number);
          break;
        case Write::kData:
          p.detach().mul_(0.9 * number);
          break;
        case Write::kRaw: {
          if (p.numel() == 0) break;
          const std::int64_t at = (p.numel() - 1) / 2 * static_cast<std::int64_t>(p.element_size());
          const torch::Tensor one = torch::full({1}, 0.1 * number, p.options());
          std::memcpy(static_cast<std::byte*>(p.mutable_data_ptr()) + at, one.const_data_ptr(),
                      p.element_size());
          break;
        }
        case Write::kSwap:
        case Write::kAverage:
          p.copy_(averaged_[i]).mul_(number);
          break;
        case Write::kNewMemory:
          p.set_data(p.detach().clone().mul_(number));
          break;
        case Write::kNewMemoryOnOneRank:
          if (rank_ == program_.size - 1) p.set_data(p.detach().clone());
          break;
        case Write::kLoad:
          p.zero_();
          break;
      }
    }
    if (write == Write::kSwap) {
      Note("loss of averaged weights", net_->Loss(rank_, 60, 0));
      for (std::size_t i = first; i < end; ++i) torch::Tensor(parameters[i]).copy_(copies[i]);
    }
    if (write == Write::kLoad) torch::load(net_, saved);
  }

  const Program& program_;
  const int rank_;
  const bool sharded_;
  const std::string file_;
  std::shared_ptr<Net> net_;
  std::vector<habits::AnyOptimizer> optimizers_;
  GradScaler scaler_{GradScalerOptions().init_scale(256).growth_interval(2)};
  std::vector<bool> is_frozen_;
  std::int64_t added_ = 0;
  std::int64_t added_then_ = 0;  // when the checkpoint was written
  Tensors averaged_;
  std::vector<Seen> seen_;
};

}  // namespace sirtaki::tests::random_training
