#include "frameworks/torch/gradients/gradient_buckets.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/base/digest.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "fusion/bucket_plan.h"

namespace sirtaki::detail {
namespace {

// What a rank says: that it takes part, then these of each gradient. The sums decide.
enum BucketField : std::int64_t { kPlace, kDense, kStaysOut, kBucketFieldCount };

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

// The keys and strides, which all ranks must have alike: memory is reduced as it lies.
std::uint64_t LayoutOf(const GradientBuckets::Gradients& gradients,
                       const std::vector<std::vector<std::int64_t>>& strides, bool in_arena) {
  std::string text = in_arena ? "in an arena " : "";
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    text += gradients[i]->key();
    for (const std::int64_t stride : strides[i]) text += ' ' + std::to_string(stride);
    text += '\0';
  }
  return std::max<std::uint64_t>(core::Digest(text.data(), text.size()), 1);
}

// `the gradients of "fc1.weight", "fc1.bias" and 3 more`
std::string NamesOf(const GradientBuckets::Gradients& gradients) {
  constexpr std::size_t kMostTold = 2;
  std::string text = gradients.size() == 1 ? "the gradient of " : "the gradients of ";
  for (std::size_t i = 0; i < std::min(gradients.size(), kMostTold); ++i) {
    text += (i == 0 ? "" : ", ") + core::Quoted(gradients[i]->name());
  }
  if (gradients.size() <= kMostTold) return text;
  return text + " and " + std::to_string(gradients.size() - kMostTold) + " more";
}

}  // namespace

GradientBuckets::GradientBuckets(const SessionSet& set, int number, const std::string& prefix,
                                 std::shared_ptr<const GradientRule> rule)
    : set_(set),
      number_(static_cast<std::uint64_t>(number)),
      key_("#the agreement on the buckets of " + prefix.substr(0, prefix.size() - 1)),
      rule_(std::move(rule)),
      joins_(set_.session->JoinsOf(set_.members.set)) {}

GradientBuckets::~GradientBuckets() { Dissolve(); }

void GradientBuckets::Dissolve() {
  for (const auto& gradient : gradients_) gradient->TakeOut();
  gradients_.clear();
  for (const ops::nccl::ArenaPtr& arena : arenas_) arena->Retire();
  arenas_.clear();
  names_.reset();
  laid_out_ = false;
}

bool GradientBuckets::Fits() const {
  return !renew_ && joins_before_ == *joins_ && limits_ == set_.session->session().limits() &&
         std::none_of(gradients_.begin(), gradients_.end(), [](const auto& gradient) {
           return gradient->shared() || !gradient->in_bucket();
         });
}

// The same on all ranks, as is everything that decides whether there is something to agree on.
bool GradientBuckets::Wanted(const Gradients& members) const {
  return set_.session->session().limits().bucket_bytes > 0 && set_.size() > 1 && !rule_->hook &&
         !rule_->of_steps() && !members.empty();
}

// Nothing has happened since the layout was decided that all ranks take as its end.
bool GradientBuckets::Lasts() const {
  return !renew_ && joins_before_ == *joins_ && limits_ == set_.session->session().limits();
}

void GradientBuckets::Ask(const Gradients& members) {
  if (asked_ || orders_ || (laid_out_ && Fits()) || !Wanted(members)) return;
  renew_ = false;
  if (joins_before_ != *joins_) layouts_ = 0;
  joins_before_ = *joins_;
  limits_ = set_.session->session().limits();
  told_ = at::zeros({1 + kBucketFieldCount * static_cast<std::int64_t>(members.size())}, at::kLong);
  auto* const mine = told_.mutable_data_ptr<std::int64_t>();
  mine[0] = 1;
  const std::vector<std::int64_t> places = set_.session->session().config().deterministic
                                               ? ReversePlaces(members.size())
                                               : SeenPlaces(members);
  for (std::size_t i = 0; i < members.size(); ++i) {
    const ParameterGradient& gradient = *members[i];
    std::int64_t* const of_gradient = mine + 1 + kBucketFieldCount * static_cast<std::int64_t>(i);
    of_gradient[kPlace] = places[i];
    of_gradient[kDense] = gradient.seen().dense ? 1 : 0;
    const bool other = &gradient.rule() != rule_.get() || gradient.shared();
    of_gradient[kStaysOut] = other || gradient.seen().stays_out ? 1 : 0;
  }
  TensorCall call;
  call.tensor = told_;
  call.name = key_;
  call.derived_name = true;
  call.process_set = set_.process_set;
  call.reduction = core::ReduceOp::kSum;
  call.in_place = true;
  call.will_wait = true;
  asked_ = PendingTensor::Start(std::move(call), set_.session);
}

void GradientBuckets::Take(const Gradients& members, bool wait) {
  if (orders_) TakeArenas();
  if (laid_out_ && !Fits()) Dissolve();
  if (!asked_) return;
  Dissolve();
  const at::Tensor told = std::exchange(told_, at::Tensor());
  std::exchange(asked_, nullptr)->Results();
  const auto* const sums = told.const_data_ptr<std::int64_t>();
  // A rank that has joined has told nothing, and would not know what the others make of it.
  if (sums[0] != set_.size() || !Lasts()) return;
  LayOut(members, sums + 1);
  if (orders_ && (wait || orders_->empty())) TakeArenas();
}

void GradientBuckets::LayOut(const Gradients& members, const std::int64_t* sums) {
  std::vector<std::pair<std::int64_t, std::size_t>> order;  // place, index
  bool any = false;
  for (std::size_t i = 0; i < members.size(); ++i, sums += kBucketFieldCount) {
    any |= sums[kDense] > 0 || sums[kStaysOut] > 0;
    if (sums[kDense] > 0 && sums[kStaysOut] == 0) order.emplace_back(sums[kPlace], i);
  }
  if (!any) return;  // a step without gradients says nothing
  std::sort(order.begin(), order.end());
  std::vector<fusion::BucketedGradient> ordered;
  for (const auto& [place, index] : order) {
    const core::Signature signature = members[index]->ExpectedSignature();
    const auto bytes = static_cast<std::int64_t>(core::SizeOf(signature.dtype));
    ordered.push_back(
        {signature.ElementCount() * bytes, signature.dtype, signature.device, signature.slot});
  }
  const auto buckets =
      fusion::PlanBuckets(ordered, {limits_.first_bucket_bytes, limits_.bucket_bytes});
  std::vector<Gradients> of_buckets(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (const std::size_t position : buckets[b]) {
      of_buckets[b].push_back(members[order[position].second]);
    }
  }
  orders_ = std::make_unique<ArenaOrders>(set_, arena_number(), of_buckets);
  laid_ = std::move(of_buckets);
}

void GradientBuckets::TakeArenas() {
  const std::unique_ptr<ArenaOrders> orders = std::move(orders_);
  std::vector<Gradients> of_buckets = std::move(laid_);
  laid_.clear();
  BucketArenas made = orders->Take();
  arenas_ = std::move(made.arenas);
  if (!Lasts()) return Dissolve();
  auto names = std::make_shared<session::BucketNames>();
  for (std::size_t b = 0; b < of_buckets.size(); ++b) {
    MakeBucket(std::move(of_buckets[b]), std::move(made.places[b]), b, names.get());
  }
  names_ = std::move(names);
  set_.session->session().observation().NoteBuckets(names_);
  ++layouts_;
  laid_out_ = true;
}

void GradientBuckets::MakeBucket(Gradients gradients, ArenaPlaces places, std::size_t index,
                                 session::BucketNames* names) {
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllReduce;
  std::vector<std::vector<std::int64_t>> strides;
  for (const auto& gradient : gradients) {
    strides.push_back(ContractStrides(gradient->parameter()));
    signature->parts.push_back(
        std::make_shared<const core::Signature>(gradient->ExpectedSignature()));
  }
  signature->layout = LayoutOf(gradients, strides, !places.empty());
  signature->subject = rule_->at_backward ? 1 : 0;  // as most of them are
  // Optimizers are numbered alike on all ranks, and each counts its own layouts.
  const core::Key key = core::Key::Bucket(set_.members.set, arena_number(), index);
  const auto bucket = std::make_shared<Bucket>(key, std::move(signature));
  names->emplace(key.ToString(), NamesOf(gradients));
  bucket->strides = std::move(strides);
  bucket->places = std::move(places);
  bucket->joins = joins_;
  bucket->joins_before = joins_before_;
  for (std::size_t part = 0; part < gradients.size(); ++part) {
    bucket->gradients.push_back(gradients[part]);
    gradients[part]->PutInto(bucket, part);
    gradients_.push_back(std::move(gradients[part]));
  }
}

}  // namespace sirtaki::detail
