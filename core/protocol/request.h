// A request is what one rank asks for: a key (which piece of work), a signature (what it is), and
// what may differ.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/types.h"
#include "core/protocol/limits.h"

namespace sirtaki::core {

// A name is a text that is copied and looked up often: its copies share it, with its hash.
class Name {
 public:
  Name() = default;
  Name(std::string text);  // NOLINT(google-explicit-constructor): a name is given as a text

  const std::string& text() const { return shared_ == nullptr ? Nothing() : shared_->text; }
  std::size_t hash() const { return shared_ == nullptr ? 0 : shared_->hash; }
  bool empty() const { return shared_ == nullptr; }
  // Whether it is a program's, of printable ASCII without quotes and backslashes, so that texts show
  // it as it is.
  bool plain() const { return shared_ != nullptr && shared_->plain; }
  bool operator==(const Name& other) const {
    return shared_ == other.shared_ || (hash() == other.hash() && text() == other.text());
  }

 private:
  struct Shared {
    std::string text;
    std::size_t hash;
    bool plain;
  };
  static const std::string& Nothing();

  std::shared_ptr<const Shared> shared_;  // null: it is empty
};

// Names a piece of work within a process set. Exactly one of three forms:
//   named    name is not empty
//   unnamed  the number of the call among the unnamed calls of the set since its last epoch
//   bucket   (arena, bucket) of a gradient arena
struct Key {
  enum class Form : std::uint8_t { kNamed, kUnnamed, kBucket };

  static Key Named(SetNumber set, std::string name) {
    return {set, Form::kNamed, std::move(name), 0, 0};
  }
  static Key Unnamed(SetNumber set, std::uint64_t call) {
    return {set, Form::kUnnamed, {}, call, 0};
  }
  static Key Bucket(SetNumber set, std::uint64_t arena, std::uint64_t bucket) {
    return {set, Form::kBucket, {}, arena, bucket};
  }

  // `join` of a set: a number that no unnamed call reaches.
  static Key Join(SetNumber set) { return Unnamed(set, ~std::uint64_t{0}); }
  bool is_join() const { return form == Form::kUnnamed && number == ~std::uint64_t{0}; }

  SetNumber set = kWorldSet;
  Form form = Form::kNamed;
  Name name;
  std::uint64_t number = 0;  // the call's number, or the arena
  std::uint64_t bucket = 0;

  // "\"layer1.weight\"", "unnamed call #7", "bucket 3 of arena 0": for texts.
  std::string ToString() const;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  // The hash is not noexcept: so libstdc++ keeps it in its tables, where it would else be computed
  // again and again.
  std::size_t operator()(const Key& key) const {
    if (key.form != Key::Form::kNamed) return OfNumbers(key);
    return key.name.hash() + std::size_t{key.set} * 0x9e3779b97f4a7c15U;
  }

 private:
  static std::size_t OfNumbers(const Key& key);
};

struct Signature;
// A signature does not change once it is shared.
using SignaturePtr = std::shared_ptr<const Signature>;

// A signature is what the ranks must agree on of a collective.
struct Signature {
  OpKind kind = OpKind::kAllReduce;
  ReduceOp reduction = ReduceOp::kSum;  // of kinds that reduce, else kSum
  DType dtype = DType::kF32;
  // All-reduce only: the 16-bit type that the elements travel as; none: they travel as they are.
  std::optional<DType> wire = std::nullopt;
  DeviceKind device = DeviceKind::kHost;
  std::uint32_t slot = 0;           // the device's slot among the rank's devices
  std::int32_t root = -1;           // world rank, of kinds that have a root, else -1
  std::vector<std::int64_t> shape;  // without the first dimension where that may differ by rank
  double prescale = 1.0;
  double postscale = 1.0;
  std::uint64_t layout = 0;  // hash of the layout, of a bucket or an arena, else 0
  // The parts of a grouped call are its tensors, in order, each with the kind of the whole and no
  // parts of its own. Of the fields above the whole then has its kind alone, that of a bucket its
  // layout as well.
  std::vector<SignaturePtr> parts = {};
  // Which average of its step a gradient belongs to, from 1, where the ranks have to agree on that;
  // else 0.
  std::uint32_t round = 0;

  // Elements of `shape` (of one row, where the first dimension may differ by rank).
  std::int64_t ElementCount() const;
  std::int64_t Bytes() const;  // of these elements; the largest number if it is too small for them
  // `all-reduce(sum) of float32 [3, 4]`, naming only what is not a default.
  std::string ToString() const;
  // Two NaN factors are equal here: the comparison is of what was asked, bit by bit.
  bool operator==(const Signature& other) const;
};

struct SignatureHash {
  std::size_t operator()(const Signature& signature) const noexcept;
};

// ---- what is asked for and is no collective ----

struct AddSet {
  RankRanges members;  // of the new set
  bool operator==(const AddSet&) const = default;
};
struct RemoveSet {
  SetNumber set = kWorldSet;
  bool operator==(const RemoveSet&) const = default;
};
// All members of the set come here, and none has joined.
struct Assembly {
  bool operator==(const Assembly&) const = default;
};
// The rank gives nothing, and will not, since its program has thrown: `Request::invalid` says so.
struct Refusal {
  bool operator==(const Refusal&) const = default;
};

// A request asks for one of these: a collective; a refusal, under a collective's key; or a change, of
// the world except an assembly. Two
// requests under one key are compatible when they ask for the same. A null signature asks for
// nothing.
using Asked = std::variant<SignaturePtr, AddSet, RemoveSet, Limits, Assembly, Refusal>;
bool AskTheSame(const Asked& a, const Asked& b);
// CollectiveOf gives null if it is none.
inline const SignaturePtr& CollectiveOf(const Asked& asked) {
  static constinit const SignaturePtr kNone;
  const auto* const signature = std::get_if<SignaturePtr>(&asked);
  return signature != nullptr ? *signature : kNone;
}
// "broadcast", "adding a process set". Precondition: it is something.
std::string_view KindName(const Asked& asked);
// AskedText gives Signature::ToString, and for a change "adding a process set of ranks 0-2".
std::string AskedText(const Asked& asked);
std::string DetailText(const Asked& asked);  // of a change "ranks 0-2"

// One rank's request. `invalid` not empty means: this rank saw that its argument is wrong (the text
// says how) and submits the key all the same, so that its peers learn it instead of waiting.
struct Request {
  Key key;
  Asked asked;
  std::string invalid;
  // One bit for each gradient of the bucket (one for a single tensor): true if this rank has none
  // and contributes zeros. Empty means that all are present.
  std::vector<bool> absent;

  const SignaturePtr& signature() const { return CollectiveOf(asked); }
};

// Whether the bits, as Request::absent has them, say that nothing is there.
bool AllAbsent(const std::vector<bool>& absent);

// An operation of this rank that has started and not finished.
struct RunningOperation {
  SetNumber set = kWorldSet;
  std::string what;  // "all-reduce of 12 tensors from \"layer1.weight\" (large lane)"
  TimePoint since{};
  std::optional<Key> key;  // of the first of a group's; none: a message, a set that comes or goes
};

}  // namespace sirtaki::core
