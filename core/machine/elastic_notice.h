// An elastic notice is what the program of an elastic job and its sirtakirun tell each other. The process
// around the program passes it on as it is: start_notice.h carries it there, a rank message from there.
// Pure.
//
//   notice := kind generation rank size port count range… text
//   range  := gap more    its first rank lies `gap` behind the last one of the range before, or behind
//                         -1, less one; so many more ranks follow it
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/rank_ranges.h"

namespace sirtaki::core {

// The variable by which a program knows that its job is elastic.
inline constexpr std::string_view kElasticVariable = "SIRTAKIRUN_ELASTIC";

struct ElasticNotice {
  enum class Kind : std::uint8_t {
    // The program tells:
    kAsks,  // it wants a place in a generation. `generation`: the one that it has left; 0: none.
            // `ranks`: those of that one that it has lost; `text`: what has failed there; `rank`:
            // 1 + the rank with which the failure began; 0: unknown
    kListens,   // it is rank 0 of the generation, and listens at `port`
    kJoined,    // it is in the generation, with all others
    kHasHeard,  // that the generation is over
    kKnows,     // that it is to change
    kHasState,  // it has what the others have trained. `rank`: 1 + the rank that has given it to all
    kCannotGoOn,  // nobody can train from what the generation has, nor could a later one. `text`: why.
                  // `rank`: 1 + the rank because of which; 0: because of no single one
    // sirtakirun tells:
    kPlace,   // its place in the generation: rank, size; `text`: rank 0's address, and its port. Of
              // rank 0 itself the port is 0: any. `ranks`: its slot of its host alone
    kOver,    // the generation is over. `text`: why
    kChange,  // it is to ask for another one between two steps. `text`: why; `ranks`: those that are
              // to get no place in that
    // The process around the program tells:
    kIsStopped,  // the program is stopped, and does not hear that the generation is over
  };
  Kind kind{};
  int generation = 0;
  int rank = 0;
  int size = 0;
  int port = 0;
  std::string text;
  RankRanges ranks;
  bool operator==(const ElasticNotice&) const = default;
};

// A notice holds this many ranges of ranks, whatever they are.
inline constexpr std::size_t kMostRangesOfNotice = 400;

// The text is cut where the notice would not fit into one of start_notice.h. Precondition: its ranks are
// at most kMostRangesOfNotice ranges.
std::string Encode(const ElasticNotice& notice);
// Nothing if the bytes are none.
std::optional<ElasticNotice> DecodeElasticNotice(std::string_view bytes);

}  // namespace sirtaki::core
