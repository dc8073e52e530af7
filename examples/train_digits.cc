// Trains a small convolutional net on handwritten digits, on as many ranks as mpirun starts:
//
//   train_digits                               one process, no mpirun needed
//   mpirun -np 2 --bind-to none train_digits   two ranks that learn together
//
// The five steps that make a LibTorch program distributed are marked below.

#include <sirtaki/torch.h>
#include <sys/ioctl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kSide = 8;
constexpr int kPixels = kSide * kSide;
constexpr int kMaxPixel = 16;
constexpr int kClasses = 10;

constexpr char kHelp[] =
    "train_digits: trains a convolutional net on handwritten digits.\n"
    "  --epochs N       passes over the training data (15)\n"
    "  --batch-size N   samples in a step of one rank (32)\n"
    "  --lr X           learning rate of one rank; multiplied by the number of ranks (0.02)\n"
    "  --seed N         of the split, the shuffling and the initial weights (1)\n"
    "  --data FILE      lines of 64 pixels (0..16) and a class (0..9), separated by commas\n"
    "                   (data/digits.csv of the examples)\n"
    "  --help           this text\n"
    "Options of the library are given as --sirtaki-name=value.\n";

struct Settings {
  std::int64_t epochs = 15;
  std::int64_t batch_size = 32;
  double lr = 0.02;
  std::int64_t seed = 1;
  std::string data;
  bool help = false;
};

// Wrong in the same way on every rank: one of them says so.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::int64_t parse_count(const std::string& flag, const std::string& text, std::int64_t least) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > 1000000000) {
    throw UsageError(flag + " takes a whole number of at least " + std::to_string(least) +
                     ", not '" + text + "'");
  }
  return value;
}

double parse_positive(const std::string& flag, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value <= 0) {
    throw UsageError(flag + " takes a positive number, not '" + text + "'");
  }
  return value;
}

Settings parse_arguments(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      settings.help = true;
      continue;
    }
    std::string value;
    const auto equals = flag.find('=');
    const bool joined = equals != std::string::npos;
    if (joined) {
      value = flag.substr(equals + 1);
      flag.resize(equals);
    }
    if (flag != "--epochs" && flag != "--batch-size" && flag != "--lr" && flag != "--seed" &&
        flag != "--data") {
      throw UsageError("unknown argument '" + flag + "'; --help shows what there is");
    }
    if (!joined) {
      if (i + 1 == argc) throw UsageError(flag + " needs a value");
      value = argv[++i];
    }
    if (flag == "--epochs") settings.epochs = parse_count(flag, value, 1);
    if (flag == "--batch-size") settings.batch_size = parse_count(flag, value, 1);
    if (flag == "--lr") settings.lr = parse_positive(flag, value);
    if (flag == "--seed") settings.seed = parse_count(flag, value, 0);
    if (flag == "--data") settings.data = value;
  }
  return settings;
}

// ---- data ----

// data/digits.csv of the examples: beside the program, in a folder above it (a build folder lies in
// the source tree), or above the current one.
std::string find_data() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (const fs::path& start : {program.parent_path(), fs::current_path(error)}) {
    for (fs::path folder = start; !folder.empty(); folder = folder.parent_path()) {
      for (const char* name : {"data/digits.csv", "examples/data/digits.csv"}) {
        if (fs::is_regular_file(folder / name, error)) return (folder / name).string();
      }
      if (folder == folder.parent_path()) break;
    }
  }
  // Perhaps on this host only.
  throw std::runtime_error(
      "data/digits.csv was not found near the program; give it with --data FILE");
}

struct Sample {
  std::vector<float> pixels;
  std::int64_t digit = 0;
};

Sample parse_line(const std::string& line, const std::string& where) {
  Sample sample;
  const char* at = line.c_str();
  for (int field = 0; field <= kPixels; ++field) {
    const bool is_class = field == kPixels;
    const int limit = is_class ? kClasses - 1 : kMaxPixel;
    char* end = nullptr;
    const long value = std::strtol(at, &end, 10);
    const char after = is_class ? '\0' : ',';
    if (end == at || value < 0 || value > limit || (*end != after && !(is_class && *end == '\r'))) {
      throw std::runtime_error(where + "field " + std::to_string(field + 1) + " of 65 is not " +
                               (is_class ? "a class from 0 to 9 that ends the line"
                                         : "a pixel from 0 to 16 with a comma behind it"));
    }
    if (is_class) {
      sample.digit = value;
    } else {
      sample.pixels.push_back(static_cast<float>(value) / kMaxPixel);
    }
    at = end + 1;
  }
  return sample;
}

std::vector<Sample> read_samples(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be opened: " + std::strerror(errno));
  std::vector<Sample> samples;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    samples.push_back(parse_line(line, path + ":" + std::to_string(number) + ": "));
  }
  if (file.bad()) throw std::runtime_error(path + ": cannot be read: " + std::strerror(errno));
  if (samples.empty()) throw std::runtime_error(path + ": holds no sample");
  return samples;
}

class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  explicit Digits(const std::vector<Sample>& samples)
      : images_(torch::empty({static_cast<std::int64_t>(samples.size()), 1, kSide, kSide})),
        classes_(torch::empty({static_cast<std::int64_t>(samples.size())}, torch::kLong)) {
    for (std::size_t i = 0; i < samples.size(); ++i) {
      std::copy(samples[i].pixels.begin(), samples[i].pixels.end(),
                images_.data_ptr<float>() + i * kPixels);
      classes_.data_ptr<std::int64_t>()[i] = samples[i].digit;
    }
  }

  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {images_[i], classes_[i]};
  }
  torch::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(images_.size(0));
  }
  const torch::Tensor& images() const { return images_; }
  const torch::Tensor& classes() const { return classes_; }

 private:
  torch::Tensor images_;
  torch::Tensor classes_;
};

// A fifth of each class is held out for the test. The same split on every rank: it depends on the
// seed.
std::pair<Digits, Digits> split(std::vector<Sample> samples, std::int64_t seed) {
  std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
  std::shuffle(samples.begin(), samples.end(), random);
  std::vector<Sample> train;
  std::vector<Sample> test;
  std::vector<int> seen(kClasses);
  for (Sample& sample : samples) {
    const bool held_out = seen[static_cast<std::size_t>(sample.digit)]++ % 5 == 0;
    (held_out ? test : train).push_back(std::move(sample));
  }
  return {Digits(train), Digits(test)};
}

// ---- model ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("hidden", hidden);
    register_module("output", output);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1(x));
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    x = torch::relu(hidden(x.flatten(1)));
    return output(x);
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 24, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(24, 48, 3).padding(1)};
  torch::nn::Linear hidden{48 * kPixels / 4, 64};
  torch::nn::Linear output{64, kClasses};
};
TORCH_MODULE(Net);

// From one rank's learning rate up to that of all ranks together during the warm-up, then down to
// zero along a cosine.
class WarmupCosine : public torch::optim::LRScheduler {
 public:
  WarmupCosine(torch::optim::Optimizer& optimizer, double one_rank, double all_ranks,
               std::int64_t warmup_steps, std::int64_t all_steps)
      : LRScheduler(optimizer),
        one_rank_(one_rank),
        all_ranks_(all_ranks),
        warmup_steps_(static_cast<double>(warmup_steps)),
        all_steps_(static_cast<double>(all_steps)) {}

 private:
  std::vector<double> get_lrs() override {
    const auto step = static_cast<double>(step_count_);
    double lr = 0;
    if (step < warmup_steps_) {
      lr = one_rank_ + (all_ranks_ - one_rank_) * step / warmup_steps_;
    } else {
      const double share = std::min(1.0, (step - warmup_steps_) / (all_steps_ - warmup_steps_));
      lr = all_ranks_ * 0.5 * (1 + std::cos(3.14159265358979 * share));
    }
    return std::vector<double>(get_current_lrs().size(), lr);
  }

  const double one_rank_;
  const double all_ranks_;
  const double warmup_steps_;
  const double all_steps_;
};

// ---- what the user sees, from rank 0 only ----

class Progress {
 public:
  explicit Progress(std::int64_t epochs) : epochs_(epochs), speaks_(sirtaki::rank() == 0) {
    // mpirun gives its ranks a terminal of its own making, which has no width.
    winsize window{};
    bar_ = isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 &&
           window.ws_col >= 60;
  }

  void step(std::int64_t epoch, std::int64_t step, std::int64_t steps) {
    if (!speaks_ || !bar_) return;
    constexpr int kWidth = 40;
    const int done = static_cast<int>(kWidth * step / steps);
    std::printf("\repoch %3lld/%lld [%s%s]", static_cast<long long>(epoch),
                static_cast<long long>(epochs_), std::string(done, '=').c_str(),
                std::string(kWidth - done, ' ').c_str());
    std::fflush(stdout);
  }

  void epoch(std::int64_t epoch, double loss, double accuracy) {
    if (!speaks_) return;
    std::printf("%sepoch %3lld/%lld: loss %.4f, test accuracy %.2f %%%s\n", bar_ ? "\r" : "",
                static_cast<long long>(epoch), static_cast<long long>(epochs_), loss,
                100 * accuracy, bar_ ? "            " : "");
    std::fflush(stdout);
  }

 private:
  const std::int64_t epochs_;
  const bool speaks_;
  bool bar_ = false;
};

// ---- training ----

double sum_over_ranks(double value, const std::string& name) {
  const auto sum =
      sirtaki::allreduce(torch::tensor(value, torch::kDouble),
                         sirtaki::AllreduceOptions().name(name).op(sirtaki::ReduceOp::Sum));
  return sum.item<double>();
}

// Each rank tests its share of the samples.
double test_accuracy(Net& net, const Digits& test) {
  torch::NoGradGuard no_grad;
  net->eval();
  using torch::indexing::None;
  using torch::indexing::Slice;
  const Slice share(sirtaki::rank(), None, sirtaki::size());
  const auto guesses = net(test.images().index({share})).argmax(1);
  const auto right = (guesses == test.classes().index({share})).sum().item<double>();
  net->train();
  return sum_over_ranks(right, "right answers") / static_cast<double>(*test.size());
}

// Compares every bit of every parameter with rank 0's.
bool identical_on_all_ranks(const Net& net) {
  double differ = 0;
  for (const auto& item : net->named_parameters()) {
    const torch::Tensor mine = item.value().detach().contiguous();
    const torch::Tensor of_root =
        sirtaki::broadcast(mine, 0, sirtaki::BroadcastOptions().name("compare " + item.key()));
    differ += std::memcmp(mine.data_ptr(), of_root.data_ptr(), mine.nbytes()) != 0;
  }
  return sum_over_ranks(differ, "parameters that differ") == 0;
}

struct Plan {
  Digits train;
  Digits test;
  std::int64_t local_samples;  // of one rank in an epoch
  std::int64_t steps;          // in an epoch
};

// Reads the data, and says what there is to do.
Plan make_plan(const Settings& settings) {
  const auto size = static_cast<std::size_t>(sirtaki::size());
  auto [train, test] =
      split(read_samples(settings.data.empty() ? find_data() : settings.data), settings.seed);
  const auto local_samples = static_cast<std::int64_t>(*train.size() / size);
  const std::int64_t steps = (local_samples + settings.batch_size - 1) / settings.batch_size;
  if (steps == 0 || *test.size() == 0) {
    throw std::runtime_error("too few samples for " + std::to_string(size) + " ranks");
  }
  if (sirtaki::rank() == 0) {
    std::printf("%zu training and %zu test samples; %zu rank%s, batches of %lld each\n",
                *train.size(), *test.size(), size, size == 1 ? "" : "s",
                static_cast<long long>(settings.batch_size));
    std::fflush(stdout);
  }
  return {std::move(train), std::move(test), local_samples, steps};
}

// This rank's share of the training data, another one in each epoch.
auto make_loader(const Plan& plan, const Settings& settings, std::int64_t epoch) {
  torch::data::samplers::DistributedRandomSampler sampler(
      *plan.train.size(), static_cast<std::size_t>(sirtaki::size()),
      static_cast<std::size_t>(sirtaki::rank()), /*allow_duplicates=*/false);
  sampler.set_epoch(static_cast<std::size_t>(settings.seed * 100003 + epoch));
  return torch::data::make_data_loader(
      Digits(plan.train).map(torch::data::transforms::Stack<>()), std::move(sampler),
      torch::data::DataLoaderOptions(static_cast<std::size_t>(settings.batch_size)));
}

void report(const Net& net, double accuracy, double samples_per_second) {
  if (!identical_on_all_ranks(net)) throw std::runtime_error("the ranks' parameters differ");
  if (sirtaki::rank() != 0) return;
  std::printf("test accuracy: %.2f %%\n", 100 * accuracy);
  std::printf("speed: %.0f samples per second\n", samples_per_second);
  std::printf("parameters identical on all ranks\n");
  std::fflush(stdout);
}

void train(const Settings& settings) {
  const Plan plan = make_plan(settings);
  torch::manual_seed(static_cast<std::uint64_t>(settings.seed + sirtaki::rank()));
  Net net;

  // Step 2: more ranks make a larger batch, so the learning rate grows with them.
  const double scaled_lr = settings.lr * sirtaki::size();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(settings.lr).momentum(0.9));

  // Step 3: wrap the optimizer; its step() now averages the gradients of all ranks.
  auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), net->named_parameters());

  // Step 4: start from the same weights everywhere.
  sirtaki::broadcast_parameters(*net, /*root_rank=*/0);
  sirtaki::broadcast_optimizer_state(optimizer, /*root_rank=*/0);

  WarmupCosine scheduler(optimizer, settings.lr, scaled_lr,
                         std::min<std::int64_t>(2, settings.epochs) * plan.steps,
                         (settings.epochs + 1) * plan.steps);
  Progress progress(settings.epochs);
  std::chrono::duration<double> training_time{0};
  double accuracy = 0;
  for (std::int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    // Step 5: each rank takes its share of the data.
    const auto loader = make_loader(plan, settings, epoch);
    const auto start = std::chrono::steady_clock::now();
    double loss_sum = 0;
    std::int64_t step = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(net(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      scheduler.step();
      loss_sum += loss.item<double>();
      progress.step(epoch, ++step, plan.steps);
    }
    training_time += std::chrono::steady_clock::now() - start;
    const double mean_loss = sum_over_ranks(loss_sum / static_cast<double>(plan.steps), "loss");
    accuracy = test_accuracy(net, plan.test);
    progress.epoch(epoch, mean_loss / sirtaki::size(), accuracy);
  }
  const auto samples = static_cast<double>(settings.epochs * plan.local_samples * sirtaki::size());
  report(net, accuracy, samples / training_time.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    // Step 1: join the ranks that mpirun has started.
    sirtaki::init(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_digits: %s\n", error.what());
    return EXIT_FAILURE;
  }
  const int rank = sirtaki::rank();
  int exit_code = EXIT_SUCCESS;
  try {
    const Settings settings = parse_arguments(argc, argv);
    if (!settings.help) {
      train(settings);
    } else if (rank == 0) {
      std::fputs(kHelp, stdout);
    }
  } catch (const UsageError& error) {
    if (rank == 0) std::fprintf(stderr, "train_digits: %s\n", error.what());
    exit_code = 2;
  } catch (const sirtaki::Error& error) {
    std::fprintf(stderr, "train_digits: rank %d: %s\n", rank, error.what());
    exit_code = EXIT_FAILURE;
  } catch (const std::exception& error) {
    // Something that only this rank may know of: the others must not wait for it.
    std::fprintf(stderr, "train_digits: rank %d: %s\n", rank, error.what());
    sirtaki::abort(error.what());
    exit_code = EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return exit_code;
}
