// All-reduce with Adasum, by vector halving and distance doubling.
//
// With p the greatest power of two that is not above the number of members n:
//   fold    where n is not a power of two: member p+i gives its whole vector to member i, which
//           combines the two by itself.
//   halve   at distance d = 1, 2, … p/2 member i and member i^d exchange halves of what they hold:
//           the lower one keeps the first half, of its own vector (a) and of the other's (b). The
//           vectors that are combined here lie scattered over the 2d members from i/2d*2d on, so
//           these add up their products, tensor by tensor, by exchanging them at distances 1, … d.
//           All get the same bits: at each distance both partners add the same two numbers.
//   gather  at distance p/2, … 1 the partners exchange what they hold, so that the vector is whole.
//   unfold  member i gives the result to member p+i.
//
// So with n = 2^k the result is that of a balanced tree: of the ranks' first and second halves,
// each combined alike.
//
// The whole group is in memory at once, in the type in which it is computed (half types in
// float32): in staging, or in the output of a large tensor that is alone. Half as much again takes
// what arrives; as much again where a member folds.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/groups/adasum.h"
#include "ops/groups/exchange_slices.h"
#include "ops/groups/reduction_terms.h"
#include "ops/groups/run_makers.h"

namespace sirtaki::ops {
namespace {

class AdasumRun : public GroupRun {
 public:
  explicit AdasumRun(const RunContext& context)
      : GroupRun(context),
        vector_(Fuse()),
        power_(static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(members())))),
        folded_(members() - power_),
        products_(task()->items.size()),
        received_(task()->items.size()) {
    starts_.push_back(0);
    for (const GroupItem& item : task()->items) {
      starts_.push_back(starts_.back() + item.signature->ElementCount());
    }
  }

 private:
  // Where the run is: `kXxx` means that its exchange is under way.
  enum class Step : std::uint8_t { kBegin, kFold, kHalve, kProducts, kGather, kUnfold };

  fusion::FusedVector Fuse() const {
    const core::DType dtype = task()->signature().dtype;
    // One window: the tensors lie in it in their own order.
    const fusion::Cutting whole{.chunk_bytes = std::numeric_limits<std::int64_t>::max()};
    return {dtype, fusion::AccumulationType(dtype), ReducedPieces(*task()), whole};
  }

  bool Next() override {
    if (vector_.windows().empty()) return false;
    ReserveMemory();
    switch (step_) {
      case Step::kBegin:
        trace_.Pack();
        vector_.LoadInto(vector_.windows().front(), own_, {.factor = Signature().prescale});
        if (folded_ > 0) return BeginFold();
        return BeginHalve();
      case Step::kFold:
        if (self() < folded_) {
          trace_.Reduce();
          ClearProducts();
          AddProducts({0, vector_.count()}, own_, other_);
          CombineTensors({0, vector_.count()}, own_, other_);
        }
        return BeginHalve();
      case Step::kHalve:
        trace_.Reduce();
        ClearProducts();
        if (takes_part()) AddProducts(kept_, A(), B());
        reach_ = 1;
        return BeginProducts();
      case Step::kProducts:
        trace_.Reduce();
        for (std::size_t t = 0; takes_part() && t < products_.size(); ++t) {
          products_[t] = products_[t] + received_[t];
        }
        reach_ *= 2;
        if (reach_ <= distance_) return BeginProducts();
        if (takes_part()) CombineTensors(kept_, A(), B());
        distance_ *= 2;
        return BeginHalve();
      case Step::kGather:
        if (takes_part()) {
          kept_ = held_.back();
          held_.pop_back();
        }
        distance_ /= 2;
        return BeginGather();
      case Step::kUnfold:
        return Finish();
    }
    return false;
  }

  void ReserveMemory() {
    const std::int64_t whole = vector_.count() * element();
    const std::int64_t arriving = self() < folded_ ? whole : (vector_.count() + 1) / 2 * element();
    own_ = OwnOutput();
    auto* const memory =
        static_cast<std::byte*>(staging_.Reserve(arriving + (own_ == nullptr ? whole : 0)));
    other_ = own_ == nullptr ? memory + whole : memory;
    if (own_ == nullptr) own_ = memory;
  }

  // A large tensor that is not widened is computed where its result belongs. Null: in staging. What
  // the members exchange is the same.
  std::byte* OwnOutput() const {
    const GroupItem& item = task()->items.front();
    const bool direct = task()->items.size() == 1 && item.work != nullptr &&
                        channel().lane == fusion::Lane::kLarge &&
                        vector_.moved() == Signature().dtype;
    return direct ? static_cast<std::byte*>(item.work->output) : nullptr;
  }

  bool BeginFold() {
    slices_.Clear();
    if (!takes_part()) {
      slices_.Send(self() - power_, own_, vector_.count() * element());
    } else if (self() < folded_) {
      slices_.Receive(self() + power_, other_, vector_.count() * element());
    }
    return Exchange(Step::kFold);
  }

  bool BeginHalve() {
    if (distance_ == 1) kept_ = {0, vector_.count()};
    if (distance_ == power_) {
      distance_ /= 2;
      return BeginGather();
    }
    slices_.Clear();
    if (takes_part()) {
      const Part first{kept_.begin, kept_.count - kept_.count / 2};
      const Part second{kept_.begin + first.count, kept_.count - first.count};
      held_.push_back(kept_);
      kept_ = lower() ? first : second;
      const Part& given = lower() ? second : first;
      slices_.Send(partner(), At(given), given.count * element());
      slices_.Receive(partner(), other_, kept_.count * element());
    }
    return Exchange(Step::kHalve);
  }

  bool BeginProducts() {
    slices_.Clear();
    if (takes_part()) {
      const auto bytes = static_cast<std::int64_t>(products_.size() * sizeof(AdasumProducts));
      slices_.Send(self() ^ reach_, products_.data(), bytes);
      slices_.Receive(self() ^ reach_, received_.data(), bytes);
    }
    return Exchange(Step::kProducts);
  }

  bool BeginGather() {
    if (distance_ == 0) {
      if (folded_ > 0) return BeginUnfold();
      return Finish();
    }
    slices_.Clear();
    if (takes_part()) {
      // The partner kept these of what both held.
      const Part& held = held_.back();
      const Part others = lower() ? Part{kept_.begin + kept_.count, held.count - kept_.count}
                                  : Part{held.begin, held.count - kept_.count};
      slices_.Send(partner(), At(kept_), kept_.count * element());
      slices_.Receive(partner(), At(others), others.count * element());
    }
    return Exchange(Step::kGather);
  }

  bool BeginUnfold() {
    slices_.Clear();
    if (!takes_part()) {
      slices_.Receive(self() - power_, own_, vector_.count() * element());
    } else if (self() < folded_) {
      slices_.Send(self() + power_, own_, vector_.count() * element());
    }
    return Exchange(Step::kUnfold);
  }

  bool Finish() {
    trace_.Unpack();
    vector_.StoreFrom(vector_.windows().front(), own_, {.factor = Signature().postscale});
    return false;
  }

  bool Exchange(Step step) {
    step_ = step;
    Begin([&] { return slices_.Exchange(backend_, channel()); });
    return true;
  }

  void ClearProducts() { std::fill(products_.begin(), products_.end(), AdasumProducts{}); }

  // AddProducts adds what lies in the segment; `a` and `b` hold its elements.
  void AddProducts(const Part& segment, const std::byte* a, const std::byte* b) {
    ForEachTensor(segment, [&](std::size_t t, std::int64_t offset, std::int64_t count) {
      products_[t] = products_[t] + ProductsOf(vector_.moved(), a + offset * element(),
                                               b + offset * element(), count);
    });
  }

  // Into the segment.
  void CombineTensors(const Part& segment, const std::byte* a, const std::byte* b) {
    ForEachTensor(segment, [&](std::size_t t, std::int64_t offset, std::int64_t count) {
      Combine(vector_.moved(), FactorsOf(products_[t]), a + offset * element(),
              b + offset * element(), At(segment) + offset * element(), count);
    });
  }

  // function(tensor, offset in the segment, count)
  template <typename Function>
  void ForEachTensor(const Part& segment, Function function) const {
    const std::int64_t end = segment.begin + segment.count;
    auto t = static_cast<std::size_t>(
        std::upper_bound(starts_.begin(), starts_.end(), segment.begin) - starts_.begin() - 1);
    for (; t < products_.size() && starts_[t] < end; ++t) {
      const std::int64_t from = std::max(starts_[t], segment.begin);
      const std::int64_t to = std::min(starts_[t + 1], end);
      if (from < to) function(t, from - segment.begin, to - from);
    }
  }

  const core::Signature& Signature() const { return task()->signature(); }
  std::int64_t element() const { return BytesOf(vector_.moved()); }
  bool takes_part() const { return self() < power_; }
  std::int64_t partner() const { return self() ^ distance_; }
  bool lower() const { return (self() & distance_) == 0; }
  std::byte* At(const Part& segment) const { return own_ + segment.begin * element(); }
  // The kept segment of the lower partner's vector, and of the other's.
  const std::byte* A() const { return lower() ? At(kept_) : other_; }
  const std::byte* B() const { return lower() ? other_ : At(kept_); }

  const fusion::FusedVector vector_;
  const std::int64_t power_;   // members that halve
  const std::int64_t folded_;  // members beyond them
  std::vector<std::int64_t> starts_;
  std::vector<AdasumProducts> products_;  // by tensor
  std::vector<AdasumProducts> received_;
  std::vector<Part> held_;  // before each halving
  Part kept_;
  std::int64_t distance_ = 1;
  std::int64_t reach_ = 1;      // how far the products have been added up
  std::byte* own_ = nullptr;    // the vector
  std::byte* other_ = nullptr;  // what arrives
  Slices slices_;
  Step step_ = Step::kBegin;
};

}  // namespace

std::unique_ptr<GroupRun> MakeAdasumRun(const RunContext& context) {
  return std::make_unique<AdasumRun>(context);
}

}  // namespace sirtaki::ops
