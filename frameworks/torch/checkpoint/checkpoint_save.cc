#include "frameworks/torch/checkpoint/checkpoint_save.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/machine/fork_guard.h"
#include "core/protocol/mismatch.h"
#include "core/threads/quiet_thread.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {
namespace {

using std::chrono::milliseconds;

// Nobody rings for a file of another host, nor for a fault of the job.
constexpr milliseconds kLook{20};
constexpr milliseconds kSoon{1000};  // a thread ends that does not wait for its disk

}  // namespace

void CheckpointSave::Content::Copy() {
  if (!archive_) return;
  archive_->save_to([this](const void* bytes, std::size_t count) -> std::size_t {
    bytes_.emplace_back(static_cast<const char*>(bytes), count);
    return count;
  });
  archive_.reset();
}

void CheckpointSave::Content::WriteTo(const NewCheckpointFile::Sink& sink) {
  if (archive_) archive_->save_to(sink);
  for (const std::string& piece : bytes_) sink(piece.data(), piece.size());
  archive_.reset();
  bytes_.clear();
}

void CheckpointSave::Copy() {
  of_shards_.Copy();
  rest_.Copy();
}

void CheckpointSave::Write() {
  // Both files are on their way to the disk before the first one is waited for.
  if (!of_shards_.empty()) {
    shards_file_.emplace(Beside(path_, shards_.names()[static_cast<std::size_t>(rank_)]),
                         [this](const auto& sink) { of_shards_.WriteTo(sink); });
  }
  if (!rest_.empty()) {
    file_.emplace(path_, [this](const auto& sink) { rest_.WriteTo(sink); });
    file_->Sync();
  }
  if (shards_file_) shards_file_->Sync();
}

void CheckpointSave::Name() {
  if (shards_file_) shards_file_->Replace();
}

void CheckpointSave::Publish() {
  earlier_ = shards_.Others();
  file_->Replace();
}

void CheckpointSave::RemoveEarlier() const {
  for (const std::string& path : earlier_) {
    std::error_code error;
    std::filesystem::remove(path, error);
    if (!error) continue;
    SIRTAKI_LOG(kWarning, "save_checkpoint: the shards of an earlier save stay: "
                              << path << ": " << error.message());
  }
}

core::Duration LongestApart(core::Duration stall_limit) {
  return stall_limit > core::Duration::zero() ? stall_limit / 2 : core::Duration::max();
}

SaveBehind::SaveBehind(std::unique_ptr<CheckpointSave> save, milliseconds timeout,
                       const std::shared_ptr<SessionState>& state)
    : path_(save->path()),
      save_(std::move(save)),
      is_root_(save_->is_root()),
      timeout_(timeout),
      state_(state),
      stall_warning_(state->session().config().stall_warning),
      stall_limit_(state->session().config().stall_limit),
      fork_generation_(core::ForkGeneration()) {}

// The thread holds the save: it may be left behind, and in a forked child nothing of it is touched.
std::shared_ptr<SaveBehind> SaveBehind::Start(std::unique_ptr<CheckpointSave> save,
                                              milliseconds timeout,
                                              const std::shared_ptr<SessionState>& state) {
  std::shared_ptr<SaveBehind> behind(new SaveBehind(std::move(save), timeout, state));
  try {
    behind->thread_ = core::StartQuietThread([behind] { behind->Run(); });
  } catch (const std::system_error& error) {
    // The others do not know of it before they wait.
    behind->error_ = behind->path_ + ": there is no thread to write it: " + error.what();
    behind->written_ = behind->ended_ = true;
  }
  return behind;
}

SaveBehind::~SaveBehind() {
  if (thread_.joinable()) thread_.detach();
}

void SaveBehind::Run() {
  std::string error;
  try {
    WriteAndPublish();
  } catch (...) {
    error = TextOfCurrent();
  }
  save_.reset();  // and with it what is left of its files
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = error;
  written_ = ended_ = true;
  changed_.notify_all();
}

void SaveBehind::WriteAndPublish() {
  save_->Write();
  if (!MayGoOn()) return;
  save_->Name();
  std::unique_lock<std::mutex> lock(mutex_);
  goes_on_ = false;
  written_ = true;
  changed_.notify_all();
  while (is_root_ && !given_up_) {
    const bool is_last = last_look_;
    lock.unlock();
    const core::RankRanges missing = save_->MissingShards();
    if (missing.empty()) {
      if (MayGoOn()) save_->Publish();
      // It is asked again: the disk may have hung in between, so that the list of what to remove was
      // made when a later save had begun.
      if (MayGoOn()) save_->RemoveEarlier();
      return;
    }
    lock.lock();
    missing_ = missing;
    if (is_last) {
      throw std::runtime_error(
          path_ + ": the shards of " + core::RanksText(missing) +
          " are not in its folder: they were not written in time, or the hosts "
          "do not share the folder");
    }
    changed_.wait_for(lock, kLook, [this] { return last_look_ || given_up_; });
  }
}

bool SaveBehind::MayGoOn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  goes_on_ = !given_up_;
  return goes_on_;
}

std::string SaveBehind::TooLate(const std::string& what, core::Duration limit) const {
  const auto ms = std::chrono::duration_cast<milliseconds>(limit).count();
  const std::string in_time =
      " within " + std::to_string(ms) + " ms, " +
      (timeout_.count() > 0 ? "the timeout of its CheckpointOptions" : "the stall_limit") +
      (goes_on_ ? ": it or the checkpoint before it is there, and whole. "
                : ": it is given up, and the checkpoint before it stays. ");
  // It is not the disk of this rank, which has looked, nor those of the others, which have written.
  if (!missing_.empty() && !goes_on_ && !given_up_) {
    return path_ + ": the shards of " + core::RanksText(missing_) + " were not in its folder" +
           in_time + "The folder has to be one that all hosts share";
  }
  return path_ + ": " + what + in_time +
         "Its disk hangs or is slow; if it is only slow, give it a longer timeout";
}

std::string SaveBehind::WaitFor(Wait& wait, const bool& done, const std::string& what,
                                core::Duration most, const std::function<core::Status()>& check) {
  const core::TimePoint begin = core::Clock::now();
  const core::Duration limit = timeout_.count() > 0 ? core::Duration(timeout_) : stall_limit_;
  std::unique_lock<std::mutex> lock(mutex_);
  while ((!check || check().ok()) && !changed_.wait_for(lock, kLook, [&done] { return done; })) {
    const core::TimePoint now = core::Clock::now();
    const core::Duration waited = now - wait.since;
    if (limit > core::Duration::zero() && waited >= limit) {
      late_ = TooLate(what, limit);
      given_up_ = true;
      changed_.notify_all();
      return late_;
    }
    if (now - begin >= most) return {};
    if (wait.warning == core::Duration::zero() || waited < wait.warning) continue;
    SIRTAKI_LOG(kWarning, "save_checkpoint, written behind: "
                              << path_ << ": " << what << " for "
                              << std::chrono::duration_cast<std::chrono::seconds>(waited).count()
                              << " s");
    while (wait.warning <= waited) wait.warning *= 2;
  }
  return {};
}

void SaveBehind::Finish(const std::shared_ptr<SessionState>& state) {
  const bool was_told = is_given_up();
  // The ranks meet at once, and again and again until all are done: none is away from the others as
  // long as stall_limit, however long it waits for its disk. Only one that does not call this at all
  // keeps the others waiting, for as long as the job allows.
  const auto wait_for = [&](const bool& done, const std::string& what) {
    Wait wait = BeginWait();
    core::Duration most{0};
    for (std::vector<std::int64_t> are_done = {0}; std::ranges::count(are_done, 0) > 0;) {
      std::string error = WaitFor(wait, done, what, most, [&] { return state->Check(); });
      ThrowIfError(state->Check());
      bool is_done = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_done = done;
        if (error.empty() && !was_told) error = error_;
      }
      are_done =
          AgreeAndGather("save_checkpoint, written behind", {}, error, is_done ? 1 : 0, state);
      most = LongestApart(stall_limit_);
    }
  };
  if (was_told) return wait_for(ended_, "an earlier save has not ended");
  try {
    wait_for(written_, "it was not written");
    wait_for(ended_, "the shards of all ranks were not there");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::InvalidArgument) {
      // After a fault of the job that the thread may not know of, the save is as good as any that is
      // complete.
      (void)End();
      throw;
    }
    // All ranks have this error, and the save does not come after it was told.
    const std::lock_guard<std::mutex> lock(mutex_);
    given_up_ = told_ = true;
    changed_.notify_all();
    throw;
  }
  (void)End();
}

bool SaveBehind::is_given_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return given_up_;
}

void SaveBehind::WaitForOwn() {
  if (core::ForkGeneration() != fork_generation_) return;
  const auto state = state_.lock();
  Wait wait = BeginWait();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_since_ = wait.since;
  }
  // Ranks that leave the job wait for this one. It waits for the rest of its time when it has left.
  (void)WaitFor(wait, written_, "it was not written", LongestApart(stall_limit_),
                [&] { return state ? state->session().fault() : core::Status::Ok(); });
}

std::string SaveBehind::End() {
  if (core::ForkGeneration() != fork_generation_ || !thread_.joinable()) return {};
  Wait wait = BeginWait();
  std::string what;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // Its own disk has had its time already; not publishing, which begins when the others have left.
    if (!written_ && leaving_since_) wait.since = *leaving_since_;
    what = written_ ? "it was not published" : "it was not written";
    last_look_ = true;
    changed_.notify_all();
    // One that is given up ends soon if this rank's disk does not hang.
    if (given_up_ && late_.empty()) changed_.wait_for(lock, kSoon, [this] { return ended_; });
  }
  if (!is_given_up()) (void)WaitFor(wait, ended_, what, core::Duration::max());
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ ? thread_.join() : thread_.detach();
  if (told_) return {};
  return late_.empty() ? error_ : late_;
}

}  // namespace sirtaki::detail
