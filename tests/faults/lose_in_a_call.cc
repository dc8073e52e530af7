// lose_in_a_call HOW KIND VICTIM SEED BOARD [--sirtaki-…]: every rank calls collectives of all
// kinds in turn, until rank VICTIM kills or stops itself (HOW: killed, stopped) at a random moment
// inside a call of KIND.
//
// Each rank prints "rank R is process P" and the numbers of its shared memory first. The others
// print "rank R after T ms: ERROR", T since the loss, and end with code 3; before that they see to
// it that nobody writes to memory that they take after the error. One that was stopped is woken
// when all others have their error. BOARD: an empty file, through which they find each other.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "session/session.h"

namespace sirtaki::tests {
namespace {

using core::Clock;
using core::OpKind;
using core::Status;
using session::Session;
using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kMostRanks = 16;
constexpr auto kPatience = std::chrono::seconds(100);

enum class Memory : std::uint8_t { kPool, kPrivate };

// What is called in turn.
struct Kind {
  std::string_view name;
  OpKind op;
  Memory memory;
  std::int64_t count;  // elements of float32
};
constexpr Kind kKinds[] = {
    {"all-reduce-pool", OpKind::kAllReduce, Memory::kPool, 1 << 20},
    {"all-reduce-private", OpKind::kAllReduce, Memory::kPrivate, 1 << 20},
    {"all-reduce-small", OpKind::kAllReduce, Memory::kPrivate, 256},
    {"all-reduce-large", OpKind::kAllReduce, Memory::kPool, 4 << 20},
    {"all-gather", OpKind::kAllGather, Memory::kPool, 200'000},
    {"broadcast", OpKind::kBroadcast, Memory::kPool, 1 << 20},
    {"reduce-scatter", OpKind::kReduceScatter, Memory::kPrivate, 1 << 20},
    {"all-to-all", OpKind::kAllToAll, Memory::kPool, 1 << 20},
};
// One of each of the above at once, also a name of KIND.
constexpr std::string_view kTogether = "together";

void Say(const std::string& line) {
  std::fputs((line + "\n").c_str(), stdout);
  std::fflush(stdout);
}

[[noreturn]] void Refuse(const std::string& why) {
  Say(why);
  std::_Exit(2);
}

// In a file that all ranks have mapped.
struct Board {
  std::atomic<pid_t> process[kMostRanks];
  std::atomic<bool> inside;              // the victim is in a call of the kind
  std::atomic<std::int64_t> lost_at_us;  // on the host's clock
  std::atomic<int> failed;               // ranks that have their error, without the victim
  static_assert(std::atomic<std::int64_t>::is_always_lock_free);
};

Board& OpenBoard(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Board)) != 0) Refuse("cannot open " + path);
  void* const memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) Refuse("cannot map " + path);
  close(file);
  return *static_cast<Board*>(memory);
}

std::int64_t NowUs() {
  return duration_cast<microseconds>(Clock::now().time_since_epoch()).count();
}

float ValueOf(int rank, std::int64_t step, std::int64_t i) {
  return static_cast<float>((rank + 1) * ((step * 7 + i) % 1021));
}

std::shared_ptr<float[]> Take(Session& session, Memory where, std::int64_t count) {
  if (where == Memory::kPrivate) {
    return std::make_shared<float[]>(static_cast<std::size_t>(count));
  }
  std::shared_ptr<void> memory = session.AllocateShared(count * 4);
  auto* const floats = static_cast<float*>(memory.get());
  return {std::move(memory), floats};
}

// One collective, what goes in and what has to come out.
class Call {
 public:
  // `prefix`: of its name.
  Call(Session& session, const Kind& kind, std::string_view prefix, std::int64_t step)
      : rank_(session.topology().rank), size_(session.topology().size), kind_(kind), step_(step) {
    // Each rank gathers another number of rows; an all-to-all has as many for each.
    count_ = kind.op == OpKind::kAllGather ? RowsOf(rank_) : kind.count / size_ * size_;
    auto memory = std::make_shared<Buffers>();
    memory->input = Take(session, kind.memory, count_);
    for (std::int64_t i = 0; i < count_; ++i) memory->input[i] = ValueOf(rank_, step, i);
    auto signature = std::make_shared<core::Signature>();
    signature->kind = kind.op;
    work_->input = memory->input.get();
    work_->output = memory->input.get();
    if (core::FirstDimensionVaries(kind.op)) {
      work_->rows = count_;
      work_->output = nullptr;
      work_->allocate_output = [&session, kind, memory = memory.get()](const auto& rows) {
        std::int64_t all = 0;
        for (const std::int64_t of_rank : rows) all += of_rank;
        memory->output = Take(session, kind.memory, all);
        return static_cast<void*>(memory->output.get());
      };
    } else {
      signature->shape = {count_};
      if (core::HasRoot(kind.op)) signature->root = root();
      if (kind.op == OpKind::kReduceScatter) {
        memory->output = Take(session, kind.memory, count_ / size_);
        work_->output = memory->output.get();
      }
    }
    work_->request.asked = std::move(signature);
    work_->request.key =
        core::Key::Named(core::kWorldSet, std::string(prefix) + std::string(kind.name) + " " +
                                              std::to_string(step % 4));
    work_->keep_alive = memory;
    memory_ = std::move(memory);
  }

  const std::string& name() const { return work_->request.key.name.text(); }
  Status Submit(Session& session, bool will_wait) { return session.Submit(work_, will_wait); }
  Status Wait(Session& session) {
    Status status = session.Wait(*work_->handle);
    work_->handle->Observe();
    return status;
  }

  // A program that goes on after an error may overwrite: what others have of it then is wrong.
  void Overwrite() { std::fill_n(memory_->input.get(), count_, -1.0F); }

  // Looks at every element.
  bool IsRight() const {
    const std::int64_t part = count_ / size_;
    switch (kind_.op) {
      case OpKind::kAllReduce:
        return Matches(memory_->input.get(), count_, [&](auto i) { return SumAt(i); });
      case OpKind::kReduceScatter:
        return Matches(memory_->output.get(), part,
                       [&](auto i) { return SumAt(rank_ * part + i); });
      case OpKind::kBroadcast:
        return Matches(memory_->input.get(), count_,
                       [&](auto i) { return ValueOf(root(), step_, i); });
      case OpKind::kAllToAll:
        return Matches(memory_->output.get(), count_, [&](auto i) {
          return ValueOf(static_cast<int>(i / part), step_, rank_ * part + i % part);
        });
      default:
        break;
    }
    const float* gathered = memory_->output.get();
    bool right = true;
    for (int rank = 0; rank < size_; gathered += RowsOf(rank), ++rank) {
      right =
          right && Matches(gathered, RowsOf(rank), [&](auto i) { return ValueOf(rank, step_, i); });
    }
    return right;
  }

 private:
  struct Buffers {
    std::shared_ptr<float[]> input;
    std::shared_ptr<float[]> output;  // where it is another
  };

  template <typename Expected>
  static bool Matches(const float* values, std::int64_t count, Expected expected) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (values[i] != expected(i)) return false;
    }
    return true;
  }

  int root() const { return static_cast<int>(step_ % size_); }
  std::int64_t RowsOf(int rank) const { return kind_.count + 1000 * rank; }
  // Whole numbers: exact in any order.
  float SumAt(std::int64_t i) const {
    return ValueOf(0, step_, i) * static_cast<float>(size_ * (size_ + 1) / 2);
  }

  const int rank_;
  const int size_;
  const Kind kind_;
  const std::int64_t step_;
  std::int64_t count_ = 0;
  core::WorkPtr work_ = std::make_shared<core::Work>();
  std::shared_ptr<Buffers> memory_;
};

// Ends or stops this process while a collective of the wanted kind runs: by a timer of the
// system's, which needs no core.
class Loss {
 public:
  Loss(std::string_view wanted, Board& board) : wanted_(wanted), board_(board) {}

  // In the victim.
  void Arm(bool kills, std::uint32_t seed) {
    random_.seed(seed);
    first_ = 2 + static_cast<int>(random_() % 3);
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = kills ? SIGKILL : SIGSTOP;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0) Refuse("there is no timer");
    armed_.store(true);
  }
  // The ranks have agreed to run these, and it begins here. One call of the session at a time.
  void NoteStart(const core::RunBatch& batch) {
    const auto is_wanted = [this](const core::RunItem& item) {
      return item.key.name.text().rfind(wanted_, 0) == 0;
    };
    if (!armed_.load() || std::none_of(batch.items.begin(), batch.items.end(), is_wanted)) return;
    begun_us_.store(NowUs());
    board_.inside.store(true);
    if (++calls_ < first_ || board_.failed.load() > 0) return;
    // Somewhere in the time that the last one took, rather sooner: in the end it only waits for the
    // others.
    const auto longest = random_() % static_cast<std::uint32_t>(last_us_.load() + 1);
    SetTimer(static_cast<std::int64_t>(random_() % (longest + 1)) + 1);
  }
  // Nothing runs any more.
  void NoteEnd() {
    if (!armed_.load() || !board_.inside.exchange(false)) return;
    SetTimer(0);
    last_us_.store(NowUs() - begun_us_.load());
  }

 private:
  void SetTimer(std::int64_t us) {
    if (us > 0) board_.lost_at_us.store(NowUs() + us);
    itimerspec once{};
    once.it_value.tv_sec = us / 1'000'000;
    once.it_value.tv_nsec = us % 1'000'000 * 1000;
    timer_settime(timer_, 0, &once, nullptr);
  }

  const std::string_view wanted_;
  Board& board_;
  std::atomic<bool> armed_{false};
  std::atomic<std::int64_t> begun_us_{0};
  std::atomic<std::int64_t> last_us_{0};
  std::mt19937 random_;
  int first_ = 0;
  int calls_ = 0;  // that have begun
  timer_t timer_{};
};

// One call of each kind at once.
Status RunAtOnce(Session& session, std::span<const Kind> kinds, std::string_view prefix,
                 std::int64_t step, Loss& loss) {
  std::vector<Call> calls;
  for (const Kind& kind : kinds) calls.emplace_back(session, kind, prefix, step);
  Status status;
  for (Call& call : calls) {
    if (status.ok()) status = call.Submit(session, /*will_wait=*/calls.size() == 1);
  }
  for (Call& call : calls) {
    if (status.ok()) status = call.Wait(session);
  }
  if (!status.ok()) {
    for (Call& call : calls) call.Overwrite();
    return status;
  }
  loss.NoteEnd();
  for (const Call& call : calls) {
    if (!call.IsRight()) Refuse("WRONG RESULT of " + call.name());
  }
  return Status::Ok();
}

// Calls until one fails; its status. A wrong result ends the process.
Status CallUntilTheLoss(Session& session, Loss& loss) {
  for (std::int64_t step = 0;; ++step) {
    for (const Kind& kind : kKinds) {
      if (Status status = RunAtOnce(session, {&kind, 1}, "", step, loss); !status.ok()) {
        return status;
      }
    }
    if (Status status = RunAtOnce(session, kKinds, kTogether, step, loss); !status.ok()) {
      return status;
    }
  }
}

void Await(const char* what, const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + kPatience;
  while (!condition()) {
    if (Clock::now() > deadline) Refuse(std::string("HANGS: ") + what);
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// Memory as a program takes it after an error: of the blocks that the failed calls have had.
class Later {
 public:
  explicit Later(Session& session) {
    for (const Kind& kind : kKinds) {
      for (int i = 0; i < 3; ++i) {
        blocks_.push_back({Take(session, Memory::kPool, kind.count), kind.count});
        std::fill_n(blocks_.back().first.get(), kind.count, kMark);
      }
    }
  }
  bool IsUnharmed() const {
    for (const auto& [memory, count] : blocks_) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (memory[i] != kMark) return false;
      }
    }
    return true;
  }

 private:
  static constexpr float kMark = -4.25F;
  std::vector<std::pair<std::shared_ptr<float[]>, std::int64_t>> blocks_;
};

// The others, after the error.
void Outlive(Session& session, int victim, Board& board) {
  const Later later(session);
  Call more(session, kKinds[0], "", 0);
  if (more.Submit(session, true).ok() && more.Wait(session).ok()) Refuse("WRONG: a later call");
  const int others = session.topology().size - 1;
  if (board.failed.fetch_add(1) + 1 == others) kill(board.process[victim], SIGCONT);
  Await("another rank has no error", [&] { return board.failed.load() == others; });
  Await("the victim is still there",
        [&] { return kill(board.process[victim], 0) != 0 && errno == ESRCH; });
  if (!later.IsUnharmed()) Refuse("WRONG MEMORY: somebody has written to it after the error");
}

void SayWhatIsShared(int rank) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), none).string();
    struct stat file {};
    if (target.rfind("/memfd:sirtaki", 0) != 0 || stat(entry.path().c_str(), &file) != 0) continue;
    Say("rank " + std::to_string(rank) + " shares memory " + std::to_string(file.st_ino));
  }
}

int Run(int argc, char** argv) {
  if (argc < 6) {
    Refuse("usage: lose_in_a_call HOW KIND VICTIM SEED BOARD [--sirtaki-option=value]...");
  }
  const bool kills = std::string_view(argv[1]) == "killed";
  const int victim = std::atoi(argv[3]);
  Board& board = OpenBoard(argv[5]);
  session::StartOptions options;
  options.parsed = core::ParseConfig(std::vector<std::string>(argv + 6, argv + argc),
                                     options.environment, {}, &options.config, nullptr);
  Loss loss(argv[2], board);
  options.on_start = [&loss](const core::RunBatch& batch) { loss.NoteStart(batch); };
  std::shared_ptr<Session> session;
  if (const Status status = Session::CreateOfProcess(options, &session); !status.ok()) {
    Refuse("init: " + status.ToString());
  }
  const int rank = session->topology().rank;
  if (session->topology().size > kMostRanks) Refuse("too many ranks");
  board.process[rank].store(getpid());
  Say("rank " + std::to_string(rank) + " is process " + std::to_string(getpid()));
  SayWhatIsShared(rank);
  if (rank == victim) loss.Arm(kills, static_cast<std::uint32_t>(std::atoi(argv[4])));
  const Status status = CallUntilTheLoss(*session, loss);
  const std::int64_t us = NowUs() - board.lost_at_us.load();
  Say("rank " + std::to_string(rank) + " after " + std::to_string(us / 1000) +
      " ms: " + status.ToString());
  if (rank != victim) {
    if (board.inside.load()) Say("lost inside the call");
    Outlive(*session, victim, board);
  }
  if (session->Shutdown("done").ok()) Refuse("WRONG: a shutdown without a fault");
  return 3;
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) { return sirtaki::tests::Run(argc, argv); }
