#include "frameworks/torch/checkpoint/checkpoint_save.h"

#include <utility>

#include "core/machine/fork_guard.h"
#include "core/threads/quiet_thread.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {
namespace {

using std::chrono::milliseconds;

// Nobody rings for a file of another host, nor for a fault of the job.
constexpr milliseconds kLook{20};

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
  std::optional<NewCheckpointFile> of_shards;
  if (!of_shards_.empty()) {
    of_shards.emplace(Beside(path_, shards_.names()[static_cast<std::size_t>(rank_)]),
                      [this](const auto& sink) { of_shards_.WriteTo(sink); });
  }
  if (!rest_.empty()) {
    file_.emplace(path_, [this](const auto& sink) { rest_.WriteTo(sink); });
    file_->Sync();
  }
  if (of_shards) of_shards->Replace();
}

bool CheckpointSave::HasAllShards() const { return shards_.AreThere(); }

void CheckpointSave::Publish() {
  file_->Replace();
  shards_.RemoveOthers();
}

SaveBehind::SaveBehind(std::unique_ptr<CheckpointSave> save, milliseconds timeout)
    : save_(std::move(save)), timeout_(timeout), fork_generation_(core::ForkGeneration()) {
  thread_ = core::StartQuietThread([this] { Run(); });
}

SaveBehind::~SaveBehind() { (void)SaveBehind::End(); }

void SaveBehind::Run() {
  std::string error;
  try {
    save_->Write();
    std::unique_lock<std::mutex> lock(mutex_);
    written_ = true;
    changed_.notify_all();
    while (save_->is_root() && !given_up_) {
      const bool is_last = last_look_;
      lock.unlock();
      if (save_->HasAllShards()) {
        save_->Publish();
        break;
      }
      lock.lock();
      if (is_last) throw std::runtime_error(save_->path() + ": other ranks have not written");
      changed_.wait_for(lock, kLook, [this] { return last_look_; });
    }
  } catch (...) {
    error = TextOfCurrent();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = error;
  written_ = ended_ = true;
  changed_.notify_all();
}

std::string SaveBehind::WaitFor(const bool& done, const std::string& what,
                                const std::shared_ptr<SessionState>& state) {
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&done] { return done; })) {
    ThrowIfError(state->Check());
    if (timeout_.count() == 0 || std::chrono::steady_clock::now() - begin < timeout_) continue;
    return save_->path() + ": " + what + " within " + std::to_string(timeout_.count()) + " ms";
  }
  return error_;
}

void SaveBehind::Finish(const std::shared_ptr<SessionState>& state) {
  const auto agree = [&](const std::string& error) {
    AgreeOnList("save_checkpoint, written behind", {}, error, state, timeout_);
  };
  try {
    agree(WaitFor(written_, "it was not written", state));
    agree(WaitFor(ended_, "the shards of all ranks were not there", state));
  } catch (const Error& error) {
    // All ranks have this error, and the save does not come after it was told. After a fault of the
    // job that the thread may not know of, it is as good as any that is complete.
    if (error.code() == ErrorCode::InvalidArgument) {
      const std::lock_guard<std::mutex> lock(mutex_);
      given_up_ = true;
    }
    (void)End();
    throw;
  }
  (void)End();
}

void SaveBehind::WaitForOwn() {
  if (core::ForkGeneration() != fork_generation_) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return written_; });
}

std::string SaveBehind::End() {
  if (!thread_.joinable()) return {};
  if (core::ForkGeneration() != fork_generation_) {
    thread_.detach();
    return {};
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_look_ = true;
    changed_.notify_all();
  }
  thread_.join();
  return error_;
}

}  // namespace sirtaki::detail
