// One parameter whose gradient is reduced: the hooks in the autograd graph that notice the
// gradient, its way to the other ranks, and the way back into `.grad`.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/engine/work.h"
#include "core/protocol/request.h"
#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/gradients/gradient_history.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/session/backward_ends.h"
#include "frameworks/torch/session/session_set.h"
#include "fusion/gradient_gate.h"
#include "ops/cuda/device_work.h"
#include "session/base/devices.h"

namespace sirtaki::detail {

class GpuWaits;
class OptimizerShards;
struct Bucket;
struct BucketPart;

// The gradients that one optimizer, or module, has made have these counts in common.
struct GradientCounts {
  fusion::GateCounts gates;
  std::atomic<std::int64_t> ready{0};  // gradients, as they become ready
  // Which average of its step the next one is; 0: nobody counts.
  std::atomic<std::uint32_t> round{0};
  // Gradients that another optimizer has as well, or has had.
  std::atomic<int> shared{0};
  std::atomic<int> joined{-1};  // a rank that had joined before an average of this step; -1: none
  // These shards keep the averages; null: `.grad` does.
  std::shared_ptr<OptimizerShards> shards;
};

// Shared by all optimizers that have the parameter. Hooks run on autograd's threads, also several
// at once; everything else is called by the thread that uses the optimizers.
class ParameterGradient : public std::enable_shared_from_this<ParameterGradient> {
 public:
  struct Description {
    std::string name;
    std::string key;         // of the reduction
    std::int64_t index = 0;  // among the parameters of the optimizer that made it
    at::Tensor parameter;
    std::shared_ptr<const GradientRule> rule;
    std::shared_ptr<GradientCounts> counts;  // of the optimizer that made it
  };
  ParameterGradient(Description description, SessionSet set);
  ~ParameterGradient();  // its hooks stay, and do nothing
  ParameterGradient(const ParameterGradient&) = delete;
  ParameterGradient& operator=(const ParameterGradient&) = delete;

  const std::string& name() const { return what_.name; }
  const std::string& key() const { return what_.key; }
  const at::Tensor& parameter() const { return what_.parameter; }
  const GradientRule& rule() const { return *what_.rule; }
  fusion::GradientGate& gate() { return gate_; }

  // Puts the hooks where they belong now: a parameter may be unfrozen later, or get a new node with
  // a new type. If it is steps that are combined there are no hooks, and nothing to submit.
  void Attach();
  // zero_grad() was called: nothing that `.grad` holds counts.
  void BeginStep();
  // ---- called by the hooks ----
  // Gives the parameter's node the hooks. True if it had none, and another node had them before.
  bool HookNode();
  void OnAccumulate();                          // before the gradient is written
  void OnGradient(const at::Tensor& incoming);  // after it was written

  // No hook has seen what made the gradient, since an optimizer has got it behind zero_grad().
  void NoteHooksLate();
  // It required a gradient at some time: from then on the ranks expect a word about it in each
  // step.
  bool takes_part() const { return takes_part_; }
  // An optimizer, or module, that averages at the end of a backward(): it takes part in the end of
  // each backward() that writes this gradient.
  void AddOwner(std::weak_ptr<AveragedAtEnd> owner);

  // How often it was averaged, whether that went well or not.
  std::uint64_t averages() const { return averages_; }
  bool has_average() const { return history_.has_average(); }  // since zero_grad()
  std::uint64_t writes() const { return writes_; }             // by backward(), how many

  // ---- buckets: where it goes together with others, from the next Submit on ----
  // This rank has seen this of the gradient in the last average.
  struct Seen {
    std::int64_t order = -1;  // among the optimizer's gradients; -1: there was none
    bool stays_out = false;   // it cannot go with others
    bool dense = false;       // there was one, then or before, that was no sparse one
    bool anywhere = false;    // it was averaged, dense, as all ranks know
  };
  const Seen& seen() const { return seen_; }
  // The signature of a dense gradient shaped like the parameter.
  core::Signature ParameterSignature();
  // What the request of such a gradient is of: with a hook it moves nothing.
  core::SignaturePtr RequestOf(const core::SignaturePtr& signature) const;
  // The cuts of the shards in which its averages are kept, if no rank needs the whole of them; else
  // null.
  core::PartCuts CutsIfSharded() const;
  // Precondition of PutInto: it is not under way.
  void PutInto(std::shared_ptr<BucketPart> part) { part_ = std::move(part); }
  // Takes its bucket apart: all of its gradients go by themselves from their next Submit on.
  void TakeOut();
  // A second optimizer has it as well: it belongs to no bucket.
  void Share();
  bool shared() const { return shared_; }
  // Those that are in a bucket with it.
  std::vector<std::shared_ptr<ParameterGradient>> BucketMates() const;

  // The GPU that it was last on, if any.
  const std::shared_ptr<session::Gpu>& gpu() const { return gpu_; }
  // It was handed in while its stream was captured in a CUDA graph, and waits for Finish.
  bool captured() const { return under_way_ && under_way_->captured; }

  // Precondition: the gate was reported by the caller. Hands in a gradient that no backward() has
  // handed in. `averaged`: that of this step was averaged before. `in_step`: the program may have
  // changed it since backward(), and it is refused if its hooks came late. Throws what the engine refuses.
  void SubmitMissing(bool averaged, bool in_step);
  // Submits a refusal, by which the other ranks learn that the backward() has thrown.
  void RefuseAfterThrow();
  // Waits, and puts the average where the optimizer looks for it. Afterwards the gate is open
  // again, unless the wait was given up. Precondition: the gate is reported. May throw what
  // LibTorch or the user's hook throws. `waits`: of the current streams, which may use the average.
  core::Status Finish(GpuWaits& waits);
  // These collect in steps: Advance does not wait if the gradient is ready. It may then have
  // something else to wait for; it gives the status when it has finished.
  bool ready() const;
  std::optional<core::Status> Advance(GpuWaits& waits);
  core::HandlePtr handle() const;  // what it waits for, if that has one
  // Calls the hook, if there is one, for a gradient that goes by itself: not when it is handed in,
  // which happens in another order on each rank.
  void LaunchAlone();
  // An average is in its place, and those of gradients that share its memory are as well.
  void NoteDelivered();

 private:
  void HookTensor();
  // Hands it to its bucket, which is submitted with its last gradient; else submits it by itself.
  // `incoming`: what the engine has written into it, if its hook calls. `stays`: it is a sum of
  // before, to which nothing was added, and counts as absent.
  void Submit(bool will_wait, const at::Tensor& incoming = {}, bool stays = false);
  core::Status Refused(const std::string& text) const;
  void Refuse(std::string why, bool threw);
  bool IsLaterAverage() const;
  [[noreturn]] void ThrowWrittenAgain() const;
  void JoinEnds() const;
  std::string WhyNotAveraged() const;
  // Why there is no memory, for the peers to learn it as well; empty if there is.
  std::string TryGiveMemory(BucketPart& part);
  void GiveMemory(BucketPart& part);
  at::Tensor PlaceDense(const BucketPart& part);
  bool PlaceInArena(BucketPart& part);
  bool LiesInArena(const at::Tensor& tensor) const;
  bool MayReplaceFound() const;
  bool FoundWritten() const;
  at::Tensor FillBuffer(const BucketPart& part) const;
  bool MovesSparse() const;
  void Start(bool will_wait);
  void StartDense(std::shared_ptr<BucketPart> part, bool will_wait);
  void StartSparse(bool will_wait);
  void Launch(Bucket& bucket, bool will_wait);
  void TakeShardsOfDone(const std::shared_ptr<Bucket>& launched, bool may_wait);
  void TakeShardEarly();
  static at::Tensor BroughtShard(const BucketPart& part);
  void StartAnew();
  std::string Check(const at::Tensor& shaped);
  std::string CheckInBucket(const BucketPart& part, const at::Tensor& shaped);
  std::shared_ptr<BucketPart> PartAlone(const at::Tensor& shaped);
  std::string NoteOnGpu(ops::cuda::DeviceWork& work);
  std::string FindGpu(const at::Tensor& shaped);
  core::Signature SignatureOf(const at::Tensor& shaped) const;
  bool IsLike(const core::Signature& signature, const at::Tensor& shaped) const;
  core::Status Await();
  void ReleasePart();
  bool AbsentEverywhere() const;
  bool StartByItself(const core::Status& status);
  std::shared_ptr<Pending> AskForForms();
  bool TakeForms();
  core::Status Collect(GpuWaits& waits);
  at::Tensor TakeResult(GpuWaits& waits);
  void CollectFromHook();
  void Deliver(const at::Tensor& average);
  void Clear();

  // An average is under way from Submit to Finish. It belongs to whoever reported the gate.
  struct UnderWay {
    at::Tensor found;          // what `.grad` was then, perhaps undefined
    bool present = false;      // and whether it counts: not that of a frozen parameter
    bool shares = false;       // its memory with other tensors, and so the version
    std::int64_t version = 0;  // of `found`
    std::uint32_t round = 0;   // which average of its step it is; 0: nobody counts
    std::string refused;       // why it is not averaged; empty: it is
    bool threw = false;        // it is refused since the backward() has thrown
    bool is_put = false;       // a dense one: into its part of a bucket
    bool is_taken = false;     // into the optimizer's shards, while backward() goes on
    bool captured = false;  // in a CUDA graph, which has not computed it: nor is it sent by itself
    std::shared_ptr<Pending> sparse;  // a sparse one,
    std::exception_ptr sparse_error;  // and what it has thrown
    std::shared_ptr<Pending> forms;   // of the other ranks, after a mismatch,
    bool asked = false;               // of which it was the first,
    core::Status mismatch;            // and this its status
  };
  UnderWay& Begin();
  using Owners = std::vector<std::weak_ptr<AveragedAtEnd>>;

  const Description what_;
  const SessionSet set_;
  fusion::GradientGate gate_;
  std::mutex node_mutex_;  // guards node_, the last that has got the hooks
  std::shared_ptr<torch::autograd::Node> node_;
  std::atomic<bool> takes_part_{false};
  bool hooks_late_ = false;                            // and `.grad` was not averaged since
  std::atomic<std::shared_ptr<const Owners>> owners_;  // hooks read them
  // The sparse dimensions of the last gradient that was reduced, 0 of a dense one, are the same on
  // all ranks: those that have none reduce nothing in this form.
  std::int64_t sparse_dims_ = 0;
  // The part that the gradient has of the bucket that it goes in, which may be a bucket of this
  // gradient alone; null: it has gone in none yet. Atomic, for the optimizer may end while the
  // hooks run.
  std::atomic<std::shared_ptr<BucketPart>> part_;
  bool shared_ = false;
  std::uint64_t averages_ = 0;
  std::atomic<std::uint64_t> writes_{0};
  GradientHistory history_;
  bool delivered_ = false;  // an average, since it was last noted
  at::Tensor shard_;        // of it, if its work has brought it
  // A small gradient was moved into this tensor, which serves again as long as nobody keeps it. It is
  // undefined once somebody did, as Python does with each gradient that it has looked at.
  std::optional<at::Tensor> moved_;
  std::shared_ptr<session::Gpu> gpu_;  // that it was last on
  Seen seen_;
  std::optional<UnderWay> under_way_;
};

}  // namespace sirtaki::detail
