#include "frameworks/torch/gradients/gradient_buckets.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/base/digest.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "fusion/bucket_plan.h"

namespace sirtaki::detail {
namespace {

// A rank says that it takes part, and whether it has seen a gradient; then these of each gradient.
// The sums decide.
enum LayoutField : std::int64_t { kTakesPart, kHasSeen, kLayoutFieldCount };
enum GradientField : std::int64_t { kPlace, kDense, kStaysOut, kGradientFieldCount };

// Last comes first, as in most backward passes: an order that no thread's pace decides.
std::vector<std::int64_t> ReversePlaces(std::size_t members) {
  std::vector<std::int64_t> places(members);
  std::iota(places.rbegin(), places.rend(), 0);
  return places;
}

// The places of the gradients in the order in which they became ready here; behind them all those
// that did not.
std::vector<std::int64_t> SeenPlaces(const GradientBuckets::Gradients& members) {
  std::vector<std::int64_t> seen;
  for (const auto& member : members) {
    if (member->seen().order >= 0) seen.push_back(member->seen().order);
  }
  std::sort(seen.begin(), seen.end());
  std::vector<std::int64_t> places;
  places.reserve(members.size());
  for (const auto& member : members) {
    const std::int64_t order = member->seen().order;
    const auto place = std::lower_bound(seen.begin(), seen.end(), order) - seen.begin();
    places.push_back(order >= 0 ? place : static_cast<std::int64_t>(members.size()));
  }
  return places;
}

// The keys, strides and cuts, which all ranks must have alike: memory is reduced as it lies.
std::uint64_t LayoutOf(const GradientBuckets::Gradients& gradients,
                       const std::vector<std::vector<std::int64_t>>& strides,
                       const std::vector<core::PartCuts>& cuts, bool in_arena) {
  std::string text = in_arena ? "in an arena " : "";
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    text += gradients[i]->key();
    for (const std::int64_t stride : strides[i]) text += ' ' + std::to_string(stride);
    if (cuts[i]) text += " cut at";
    for (std::size_t c = 0; cuts[i] && c < cuts[i]->size(); ++c) {
      text += ' ' + std::to_string((*cuts[i])[c]);
    }
    text += '\0';
  }
  return std::max<std::uint64_t>(core::Digest(text.data(), text.size()), 1);
}

std::vector<std::string> NamesOf(const GradientBuckets::Gradients& gradients) {
  std::vector<std::string> names;
  for (const auto& gradient : gradients) names.push_back(gradient->name());
  return names;
}

}  // namespace

core::Work& BucketPart::Renew(bool for_gpu) {
  if (!for_gpu && work && on_gpu() == nullptr && work.use_count() == 1) {
    std::atomic_thread_fence(std::memory_order_acquire);  // others have let go of it
    work->request.asked = {};
    work->request.invalid.clear();
    work->request.absent.clear();
    work->handle.reset();
    work->kept.reset();
    memory() = {};
    return *work;
  }
  work = for_gpu ? std::make_shared<ops::cuda::DeviceWork>() : std::make_shared<core::Work>();
  work->keep_alive = std::make_shared<GradientMemory>();
  return *work;
}

ops::cuda::DeviceWork* BucketPart::on_gpu() const {
  return dynamic_cast<ops::cuda::DeviceWork*>(work.get());
}

BucketPartPtr Bucket::PartOf(const std::shared_ptr<Bucket>& bucket, std::size_t index,
                             std::weak_ptr<ParameterGradient> gradient, core::SignaturePtr like,
                             std::vector<std::int64_t> strides) {
  BucketPart& part = bucket->parts[index];
  part.bucket = bucket.get();
  part.index = index;
  part.gradient = std::move(gradient);
  part.like = std::move(like);
  part.strides = std::move(strides);
  return {bucket, &part};
}

void Bucket::TakeApart() {
  is_apart = true;
  if (hook && hook->line) hook->line->line.Leave(static_cast<std::size_t>(hook->given.index));
}

GradientBuckets::GradientBuckets(const SessionSet& set, int number, const std::string& prefix,
                                 std::shared_ptr<const GradientRule> rule)
    : set_(set),
      number_(static_cast<std::uint64_t>(number)),
      prefix_(prefix),
      key_("#the agreement on the buckets of " + prefix.substr(0, prefix.size() - 1)),
      rule_(std::move(rule)),
      joins_(set_.session->JoinsOf(set_.members.set)) {}

GradientBuckets::~GradientBuckets() { Dissolve(); }

void GradientBuckets::Dissolve() {
  for (const auto& bucket : buckets_) bucket->TakeApart();
  buckets_.clear();
  gradients_.clear();
  for (const ops::nccl::ArenaPtr& arena : arenas_) arena->Retire();
  arenas_.clear();
  left_out_.clear();
  names_.reset();
}

// Whether there is a layout, and none is needed in its place.
bool GradientBuckets::Fits() const {
  return names_ && Lasts() &&
         std::all_of(buckets_.begin(), buckets_.end(),
                     [](const auto& bucket) { return bucket->goes_on(); }) &&
         std::none_of(gradients_.begin(), gradients_.end(),
                      [](const auto& gradient) { return gradient->shared(); });
}

// The answer is the same on all ranks, as is everything that decides whether there is something to
// agree on.
bool GradientBuckets::Wanted(const Gradients& members) const {
  return set_.session->session().limits().bucket_bytes > 0 && set_.size() > 1 &&
         !rule_->of_steps() && !members.empty();
}

// Nothing has happened since the layout was decided that all ranks take as its end.
bool GradientBuckets::Lasts() const {
  return !renew_ && joins_before_ == *joins_ && limits_ == set_.session->session().limits();
}

void GradientBuckets::Ask(const Gradients& members) {
  if (asked_ || orders_ || Fits() || !Wanted(members)) return;
  renew_ = false;
  if (joins_before_ != *joins_) layouts_ = 0;
  joins_before_ = *joins_;
  limits_ = set_.session->session().limits();
  const auto count = static_cast<std::int64_t>(members.size());
  TensorCall call =
      OwnCall(core::OpKind::kAllReduce,
              at::zeros({kLayoutFieldCount + kGradientFieldCount * count}, at::kLong), key_, set_);
  auto* told = call.tensor.mutable_data_ptr<std::int64_t>();
  told[kTakesPart] = 1;
  told[kHasSeen] = std::any_of(members.begin(), members.end(),
                               [](const auto& member) { return member->seen().order >= 0; });
  told += kLayoutFieldCount;
  const std::vector<std::int64_t> places = set_.session->session().config().deterministic
                                               ? ReversePlaces(members.size())
                                               : SeenPlaces(members);
  for (std::size_t i = 0; i < members.size(); ++i, told += kGradientFieldCount) {
    const ParameterGradient& gradient = *members[i];
    told[kPlace] = places[i];
    told[kDense] = gradient.seen().dense;
    const bool other = &gradient.rule() != rule_.get() || gradient.shared();
    told[kStaysOut] = other || gradient.seen().stays_out;
  }
  call.derived_name = true;
  call.will_wait = false;
  call.in_place = true;
  asked_ = PendingTensor::Start(std::move(call), set_.session);
}

void GradientBuckets::Take(const Gradients& members, bool wait) {
  if (orders_) TakeArenas();
  if (!Fits()) Dissolve();
  if (!asked_) {
    // The next average makes a layout with what this one is the first to have.
    renew_ |= std::any_of(left_out_.begin(), left_out_.end(),
                          [](const auto& gradient) { return gradient->seen().anywhere; });
    return;
  }
  Dissolve();
  const at::Tensor told = std::exchange(asked_, nullptr)->Results().front();
  const auto* const sums = told.const_data_ptr<std::int64_t>();
  // A rank that has joined has told nothing, and would not know what the others make of it. An average
  // without gradients says nothing of their order.
  if (sums[kTakesPart] != set_.size() || sums[kHasSeen] == 0 || !Lasts()) return;
  LayOut(members, sums + kLayoutFieldCount);
  if (orders_ && (wait || orders_->empty())) TakeArenas();
}

void GradientBuckets::LayOut(const Gradients& members, const std::int64_t* sums) {
  std::vector<std::pair<std::int64_t, std::size_t>> order;  // place, index
  for (std::size_t i = 0; i < members.size(); ++i, sums += kGradientFieldCount) {
    if (sums[kStaysOut] > 0) continue;
    if (sums[kDense] > 0) {
      order.emplace_back(sums[kPlace], i);
    } else {
      left_out_.push_back(members[i]);
    }
  }
  std::sort(order.begin(), order.end());
  std::vector<core::Signature> ordered;
  for (const auto& [place, index] : order) ordered.push_back(members[index]->ParameterSignature());
  const auto buckets =
      fusion::PlanBuckets(ordered, {limits_.first_bucket_bytes, limits_.bucket_bytes});
  std::vector<Gradients> of_buckets(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (const std::size_t position : buckets[b]) {
      of_buckets[b].push_back(members[order[position].second]);
    }
  }
  // An arena would keep the memory that shards are to give back, and a hook has a buffer.
  orders_ = std::make_unique<ArenaOrders>(set_, layout_number(), std::move(of_buckets),
                                          !rule_->keeps_shards && !rule_->hook);
}

void GradientBuckets::TakeArenas() {
  const std::unique_ptr<ArenaOrders> orders = std::move(orders_);
  BucketArenas made = orders->Take();
  arenas_ = std::move(made.arenas);
  if (!Lasts()) return Dissolve();
  auto names = std::make_shared<session::BucketNames>();
  const auto line = rule_->hook ? std::make_shared<HookLine>(made.buckets.size()) : nullptr;
  for (std::size_t b = 0; b < made.buckets.size(); ++b) {
    const std::shared_ptr<Bucket> bucket =
        MakeBucket(std::move(made.buckets[b]), std::move(made.places[b]), b, names.get());
    if (!line) continue;
    bucket->hook->line = line;
    bucket->hook->given.index = static_cast<std::int64_t>(b);
    bucket->hook->given.is_last = b + 1 == made.buckets.size();
    line->buckets[b] = bucket;
  }
  names_ = std::move(names);
  set_.session->session().observation().NoteBuckets(names_);
  ++layouts_;
}

std::shared_ptr<Bucket> GradientBuckets::MakeBucket(Gradients gradients, ArenaPlaces places,
                                                    std::size_t index,
                                                    session::BucketNames* names) {
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllReduce;
  std::vector<std::vector<std::int64_t>> strides;
  std::vector<core::PartCuts> cuts;
  std::vector<core::SignaturePtr> likes;
  for (const auto& gradient : gradients) {
    cuts.push_back(gradient->CutsIfSharded());
    strides.push_back(ContractStrides(gradient->parameter()));
    likes.push_back(std::make_shared<const core::Signature>(gradient->ParameterSignature()));
    signature->parts.push_back(gradient->RequestOf(likes.back()));
  }
  signature->layout = LayoutOf(gradients, strides, cuts, !places.empty());
  signature->round = rule_->at_backward ? 1 : 0;  // as most of them are
  // Optimizers are numbered alike on all ranks, and each counts its own layouts.
  const core::Key key = core::Key::Bucket(set_.members.set, layout_number(), index);
  const auto bucket = std::make_shared<Bucket>(key, std::move(signature));
  names->emplace(key.ToString(), GradientsText(NamesOf(gradients)));
  bucket->joins = joins_;
  bucket->joins_before = joins_before_;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    BucketPartPtr part =
        Bucket::PartOf(bucket, i, gradients[i], std::move(likes[i]), std::move(strides[i]));
    part->cuts = std::move(cuts[i]);
    if (!places.empty()) part->place = std::move(places[i]);
    gradients[i]->PutInto(std::move(part));
  }
  if (rule_->hook) bucket->hook = MakeHook(*bucket, gradients);
  if (bucket->hook) bucket->hook->given.name = prefix_ + key.ToString();
  gradients_.insert(gradients_.end(), gradients.begin(), gradients.end());
  buckets_.push_back(bucket);
  return bucket;
}

// The buffer lies where the backend sees it: most hooks reduce it. A rank that has no memory for it
// leaves the others' hooks without theirs.
std::unique_ptr<BucketHook> GradientBuckets::MakeHook(const Bucket& bucket,
                                                      const Gradients& gradients) const {
  auto hook = std::make_unique<BucketHook>(set_, rule_->hook);
  std::int64_t elements = 0;
  for (const auto& gradient : gradients) {
    hook->starts.push_back(elements);
    elements += gradient->parameter().numel();
    hook->given.parameters.push_back(gradient->name());
    hook->given.parameter_tensors.push_back(gradient->parameter());
  }
  try {
    const at::Tensor& first = gradients.front()->parameter();
    const at::Tensor one = at::empty({1}, first.options().requires_grad(false));
    hook->given.buffer =
        EmptyForBackend(one.expand({elements}), /*strides=*/{1}, set_.session->session());
  } catch (const std::exception& error) {
    set_.session->session().Abort(
        "there is no memory for the buffer of a communication hook, for " +
        GradientsText(hook->given.parameters) + ": " + TextOf(error));
    ThrowIfError(set_.session->Check());
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    hook->given.gradients.push_back(hook->given.buffer.as_strided(
        gradients[i]->parameter().sizes(), bucket.parts[i].strides, hook->starts[i]));
  }
  return hook;
}

}  // namespace sirtaki::detail
