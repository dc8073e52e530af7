// One thing that a rank did, as the recorder keeps it: an instant, or a time from `begin` to `end`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/base/types.h"

namespace sirtaki::core::trace {

// Each kind says what the other fields mean; those that are not named are zero.
enum class EventKind : std::uint8_t {
  // ---- of a tensor, a bucket or another key; text: its name ----
  kSubmit,     // by this rank; number: it is the n-th of its set here; bytes
  kNegotiate,  // from its submission here until all ranks' agreement came; number: the batch
  kRefuse,     // the ranks asked for different things; text: what was told, cut
  // ---- of a group that is moved together; number: the n-th group here; bytes; count: tensors ----
  kQueue,   // from the agreement until it began; text: what it is
  kBegin,   // the lane has begun it; text: what it is
  kWait,    // a device, for what makes the inputs
  kPack,    // text: none
  kMove,    // text: the backend
  kUnpack,  // text: none
  kFinish,  // all of it; text: what it is
  // ---- of the program ----
  kStep,     // an optimizer's step, from its backward's first gradient; number: it is the n-th
  kWaitFor,  // a thread waited for a handle; text: its name
  kMark,     // the program's own; text: what it said
  // ---- of a pipeline; number: it is in the n-th batch ----
  kBatch,   // all of a batch; text: the pipeline's name; count: its micro-batches
  kPass,    // a stage computes; text: "F1.2", as schedules have it
  kBubble,  // nothing is computed until what a pass needs is there; text: the pass
  kReduce,  // tied gradients are summed; text: "T:wte"
  // ---- of the rank ----
  kJoin,   // number: as kSubmit's
  kLeave,  // text: why
  kStall,  // text: the warning
  kFault,  // text: the cause
  kLost,   // events that were overwritten before they could be written; count: how many
};
inline constexpr int kEventKindCount = 22;
// "submit", "negotiate", …: as files have it.
std::string_view EventKindName(EventKind kind);

// Where it happened: what does not overlap with the rest of the same track.
enum class Track : std::uint8_t {
  kProgram,      // the program's own threads, by `thread`
  kNegotiation,  // by name: these overlap
  kSmallLane,
  kLargeLane,
  kDevice,    // by `thread`: the slot
  kPipeline,  // by `thread`: the program's that runs it
};

struct Event {
  static constexpr std::size_t kTextBytes = 72;

  EventKind kind = EventKind::kMark;
  Track track = Track::kProgram;
  std::uint8_t text_bytes = 0;
  std::uint8_t alone = 0;  // of a submission, 1: nobody else has to agree on it
  std::uint32_t thread = 0;
  std::uint32_t set = 0;
  std::uint32_t count = 0;
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  TimePoint begin{};
  TimePoint end{};  // equal to `begin`: an instant
  std::array<char, kTextBytes> letters{};

  std::string_view text() const { return {letters.data(), text_bytes}; }
  // A text that does not fit loses its middle, between whole characters of UTF-8; "…" stands there.
  void SetText(std::string_view text);
};
static_assert(std::is_trivially_copyable_v<Event> && sizeof(Event) % sizeof(std::uint64_t) == 0);

}  // namespace sirtaki::core::trace
