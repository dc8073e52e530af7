#include "frameworks/torch/session/backward_ends.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "core/threads/callers.h"

namespace sirtaki::detail {

// Lives as long as autograd's callback for its end, which is dropped if the backward() throws. When it
// dies the backward() around it, if there is one, is autograd's current task.
struct BackwardEnds::Backward {
  explicit Backward(BackwardEnds* of) : all(of) {}
  ~Backward() {
    const int around = torch::autograd::get_current_graph_task_id();
    for (const Member& member : members) {
      const auto alive = member.owner.lock();  // with the session, and so with what `all` refers to
      if (!alive) continue;
      if (!ended) {
        alive->whole_ = -1;
        if (alive->failure_.load() == nullptr) {
          if (member.met) {
            alive->FailEnd(around == -1);
          } else if (around == -1) {
            alive->LeaveUnheard();
          }
        }
      }
      if (!ended || alive->failure_.load() != nullptr) all->Enclose(alive, around);
      if (!ended) --alive->running_;
    }
  }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  void End();

  // An owner whose gradient it has met, or that a backward() within it has met and that has thrown.
  struct Member {
    std::weak_ptr<AveragedAtEnd> owner;
    bool met = false;
  };
  Member* Find(const AveragedAtEnd* owner) {
    const auto found = std::find_if(members.begin(), members.end(), [owner](const Member& known) {
      return known.owner.lock().get() == owner;
    });
    return found == members.end() ? nullptr : &*found;
  }
  Member& Add(const Owner& owner) {
    if (Member* const known = Find(owner.get())) return *known;
    ++owner->running_;
    return members.emplace_back(Member{owner});
  }

  BackwardEnds* const all;
  std::mutex mutex;  // guards the members while it runs
  std::vector<Member> members;
  std::thread::id on_cpu;  // the thread that meets its gradients on the CPU
  bool ended = false;
};

void BackwardEnds::Backward::End() {
  std::vector<Owner> alive;
  std::vector<Owner> not_met;
  std::optional<core::ServingThread> serving;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    ended = true;
    if (on_cpu != std::this_thread::get_id()) serving.emplace();
    for (const Member& member : members) {
      if (Owner locked = member.owner.lock()) (member.met ? alive : not_met).push_back(locked);
    }
  }
  std::exception_ptr first_error;
  const auto has_failed = [&first_error](const Owner& owner) {
    owner->whole_ = -1;
    const auto failure = owner->failure_.load();
    if (failure == nullptr) return false;
    first_error = *failure;
    --owner->running_;
    return true;
  };
  std::erase_if(alive, has_failed);
  std::erase_if(not_met, has_failed);
  const auto attempt = [&first_error](const auto& call) {
    try {
      call();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  for (const Owner& owner : alive) attempt([&] { owner->BeginEnd(); });
  for (const Owner& owner : not_met) {
    attempt([&] {
      owner->BeginAgain();
      owner->ThrowFailure();
    });
    --owner->running_;
  }
  // One alone in the order that all ranks have; several as they come.
  std::vector<Owner> outstanding = alive;
  while (!outstanding.empty()) {
    const bool alone = alive.size() == 1;
    std::erase_if(outstanding, [alone](const Owner& owner) { return owner->CollectEnd(alone); });
    if (!outstanding.empty()) outstanding.front()->WaitABit();
  }
  for (const Owner& owner : alive) {
    attempt([&] { owner->ConcludeEnd(); });
    --owner->running_;
  }
  if (first_error) std::rethrow_exception(first_error);
}

std::shared_ptr<BackwardEnds::Backward> BackwardEnds::FindOrBegin(int task) {
  std::shared_ptr<Backward> made;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto known = running_[task].lock()) return known;
    std::erase_if(running_, [](const auto& entry) { return entry.second.expired(); });
    made = std::make_shared<Backward>(this);
    running_[task] = made;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([made] { made->End(); });
  return made;
}

// A backward() within this task has thrown, which has to do with the owner. -1: there is none around it.
void BackwardEnds::Enclose(const Owner& owner, int task) {
  if (task == -1) {
    owner->failure_ = std::shared_ptr<const std::exception_ptr>();
    return;
  }
  const std::shared_ptr<Backward> around = FindOrBegin(task);
  const std::lock_guard<std::mutex> lock(around->mutex);
  around->Add(owner);
}

void BackwardEnds::FailAround(const Owner& owner, const std::exception_ptr& error) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return;
  owner->Fail(error);
  Enclose(owner, task);
}

bool BackwardEnds::Join(const Owner& owner, bool on_cpu, bool whole) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return true;  // somebody calls the graph's nodes by themselves
  if (owner->joined_ == task || owner->whole_ != -1) return true;
  owner->ThrowFailure();
  owner->BeginAgain();
  owner->ThrowFailure();
  const std::shared_ptr<Backward> mine = FindOrBegin(task);
  const std::thread::id self = std::this_thread::get_id();
  bool fits = true;
  std::vector<std::shared_ptr<Backward>> others;  // let go of outside the lock: it may end them
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [other, weak] : running_) {
      auto backward = weak.lock();
      if (!backward || other == task) continue;
      const std::lock_guard<std::mutex> lock_other(backward->mutex);
      // An inner backward() runs on the thread of the outer one.
      const bool elsewhere = on_cpu && backward->on_cpu != std::thread::id() &&
                             backward->on_cpu != self && !backward->ended;
      if (elsewhere && backward->Find(owner.get()) != nullptr) fits = false;
      others.push_back(std::move(backward));
    }
  }
  const std::lock_guard<std::mutex> lock(mine->mutex);
  if (on_cpu) mine->on_cpu = self;
  if (!fits) return false;  // its end is none of this owner's
  mine->Add(owner).met = true;
  owner->joined_ = task;
  if (whole) owner->whole_ = task;
  return true;
}

}  // namespace sirtaki::detail
