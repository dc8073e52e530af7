// The files of one save on one rank, and a thread that writes them while the program goes on.
#pragma once

#include <torch/serialize/archive.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/types.h"
#include "frameworks/torch/checkpoint/checkpoint_file.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
#include "frameworks/torch/session/session_state.h"

namespace sirtaki::detail {

// A save on one rank. Nothing here is collective, or of MPI. What throws throws std::runtime_error,
// whose text names the file, or what an archive throws that is saved.
class CheckpointSave {
 public:
  CheckpointSave(std::string path, ShardFiles shards, int rank)
      : path_(std::move(path)), shards_(std::move(shards)), rank_(rank) {}

  const std::string& path() const { return path_; }
  bool is_root() const { return rank_ == 0; }

  // Takes what is to be written: this rank's shards, if the save has some, and on rank 0 the rest.
  void TakeShards(torch::serialize::OutputArchive archive) { of_shards_.Take(std::move(archive)); }
  void TakeRest(torch::serialize::OutputArchive archive) { rest_.Take(std::move(archive)); }
  // Copies what was taken, so that the program may change it.
  void Copy();
  // Writes all of it, and brings it to the disk. The file at the path stays as it was.
  void Write();
  // Gives this rank's shards their name, from which rank 0 knows that they are on the disk.
  void Name();
  // The ranks whose shards are not there to be read.
  core::RankRanges MissingShards() const { return shards_.Missing(); }
  // Rank 0: lets the file at the path be the new one. Precondition: no shards are missing.
  void Publish();
  // Rank 0: removes the shards of earlier saves: those that were there when it published. So nothing of
  // a later save is removed, even if the disk hangs here until that has begun.
  void RemoveEarlier() const;
  // Removes this rank's shards. Precondition: rank 0 does not publish.
  void Withdraw() const { shards_.Remove(rank_); }

 private:
  // An archive, or the bytes that it was saved as.
  class Content {
   public:
    void Take(torch::serialize::OutputArchive archive) { archive_.emplace(std::move(archive)); }
    bool empty() const { return !archive_ && bytes_.empty(); }
    void Copy();
    void WriteTo(const NewCheckpointFile::Sink& sink);

   private:
    std::optional<torch::serialize::OutputArchive> archive_;
    std::vector<std::string> bytes_;  // one piece behind the other
  };

  const std::string path_;
  const ShardFiles shards_;
  const int rank_;
  Content of_shards_;
  Content rest_;
  std::optional<NewCheckpointFile> shards_file_;
  std::optional<NewCheckpointFile> file_;
  std::vector<std::string> earlier_;  // paths of shards
};

// The longest that a rank waits for its disk while others wait for the rank in a call: they take it for
// lost after stall_limit (0: never).
core::Duration LongestApart(core::Duration stall_limit);

// A save that a thread of its own writes. That thread makes no call of MPI: rank 0's learns that the
// other ranks have written from their files, which have their names only when they are on the disk.
// It then publishes the save, whatever the program does meanwhile.
//
// A disk may hang. So each wait has a limit: the save's timeout, or else the job's stall_limit; behind
// stall_warning it is in the log. The ranks meet while they wait, so that none is taken for lost. A
// save that was not in time on one rank is given up on all: it does not come any more. Its thread,
// which nobody can call back, goes on alone, and keeps what it uses.
class SaveBehind final : public SaveUnderWay {
 public:
  // `save`: was copied. `timeout`: 0: none.
  static std::shared_ptr<SaveBehind> Start(std::unique_ptr<CheckpointSave> save,
                                           std::chrono::milliseconds timeout,
                                           const std::shared_ptr<SessionState>& state);
  ~SaveBehind() override;  // waits for nothing
  SaveBehind(const SaveBehind&) = delete;
  SaveBehind& operator=(const SaveBehind&) = delete;

  void Finish(const std::shared_ptr<SessionState>& state) override;
  bool is_given_up() override;
  void WaitForOwn() override;
  std::string End() override;

 private:
  SaveBehind(std::unique_ptr<CheckpointSave> save, std::chrono::milliseconds timeout,
             const std::shared_ptr<SessionState>& state);

  void Run();
  void WriteAndPublish();
  // Takes the next step, which the program may see in the folder, unless the save is given up.
  bool MayGoOn();
  // A wait of the program: since when it lasts, and after how long it is in the log next.
  struct Wait {
    core::TimePoint since;
    core::Duration warning;
  };
  Wait BeginWait() const { return {core::Clock::now(), stall_warning_}; }
  // Waits for `done`, or until `check` is not ok, which is asked first; that long at the `most`, and
  // then it may be called again for the same wait. Returns the error if the whole wait is too long, and
  // the save given up; else nothing.
  std::string WaitFor(Wait& wait, const bool& done, const std::string& what, core::Duration most,
                      const std::function<core::Status()>& check = {});
  std::string TooLate(const std::string& what, core::Duration limit) const;

  const std::string path_;
  std::unique_ptr<CheckpointSave> save_;  // the thread's
  const bool is_root_;
  const std::chrono::milliseconds timeout_;
  const std::weak_ptr<SessionState> state_;
  const core::Duration stall_warning_;
  const core::Duration stall_limit_;
  const int fork_generation_;  // a child has no such thread, and what it guards may be locked
  std::mutex mutex_;           // guards what follows
  std::condition_variable changed_;
  bool written_ = false;
  bool ended_ = false;
  bool last_look_ = false;    // at the other ranks' shards
  bool given_up_ = false;     // the ranks know, or will, that one of them has failed
  bool goes_on_ = false;      // a file gets its name
  bool told_ = false;         // what has failed was thrown
  core::RankRanges missing_;  // whose shards rank 0 has not found
  std::optional<core::TimePoint> leaving_since_;  // the job
  std::string error_;                             // of the thread,
  std::string late_;                              // and of a wait
  std::thread thread_;
};

}  // namespace sirtaki::detail
