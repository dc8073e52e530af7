// A schedule says what each rank of a pipeline does and in which order. Schedules are data: they
// are made, printed, parsed and checked before anything runs. Pure: the same on every rank.
//
// Messages are matched by what they carry and never by their order. An executor takes the
// instructions of its rank one after the other:
//
//   F1.2         the forward pass of stage 1 for micro-batch 2; waits for the messages it needs
//   B1.2         its backward pass, which waits likewise
//   S1-2.3       starts to send what stage 1 has for stage 2 of micro-batch 3: activations to a
//                later stage, their gradients to an earlier one; does not wait
//   R1-2.3       posts the receive of that; does not wait
//   S0-3:mask.2  the same for the skip connection "mask" from stage 0 to stage 3
//   T:wte        sums the gradients of the tied parameter "wte" over its ranks; waits for those
//   A1           averages the gradients of stage 1 over the copies of the pipeline
//   step         makes the optimizer's step for all stages of the rank
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::parallel {

// Tensors that one stage makes and a later one takes.
struct Edge {
  int from = 0;
  int to = 0;
  std::string name;  // empty: what each stage hands to the next one; else a skip connection's
  auto operator<=>(const Edge&) const = default;
};

// A parameter that several stages have.
struct Tie {
  std::string name;
  std::vector<int> stages;
};

struct PipelineShape {
  int stages = 1;
  int ranks = 1;
  int micro_batches = 1;
  bool training = true;            // false: forward passes alone
  std::vector<int> rank_of_stage;  // empty: stage % ranks
  std::vector<Edge> skips;         // besides what each stage hands to the next one
  std::vector<Tie> ties;
  std::vector<int> recomputed;  // stages that keep their inputs alone, and run again in backward

  int RankOf(int stage) const;
  std::vector<int> StagesOf(int rank) const;  // ascending
  bool Recomputes(int stage) const;
  // The edges by which a stage is given something, and by which it gives: its neighbour's first.
  std::vector<Edge> InputsOf(int stage) const;
  std::vector<Edge> OutputsOf(int stage) const;
  // The ranks that have stages of the tie, ascending. One alone has nothing to reduce.
  std::vector<int> RanksOf(const Tie& tie) const;
  // Whether a stage has a tied parameter that other ranks have too.
  bool IsTied(int stage) const;
};

// What is wrong with a shape whatever its schedule: numbers below 1, a rank without a stage, skips
// that lead backwards, ties of one stage, names that are there twice.
core::Status CheckShape(const PipelineShape& shape);

enum class InstructionKind : std::uint8_t {
  kForward,
  kBackward,
  kSend,
  kReceive,
  kReduceTied,
  kAverage,
  kStep,
};

struct Instruction {
  InstructionKind kind = InstructionKind::kStep;
  int stage = -1;  // of this rank: the one that computes, sends, receives or is averaged
  int micro_batch = -1;
  int peer = -1;     // the stage at a message's other end
  std::string name;  // a skip connection's or a tied parameter's
  auto operator<=>(const Instruction&) const = default;

  bool computes() const;
  bool is_message() const;
  // Preconditions of these: it is a message.
  bool carries_gradient() const;
  Instruction OtherEnd() const;
  Edge edge() const;  // that it goes over, one way or the other
};

struct Schedule {
  PipelineShape shape;
  std::vector<std::vector<Instruction>> ranks;
};

// The messages that a pass waits for, and those that it makes possible.
std::vector<Instruction> ReceivesOf(const PipelineShape& shape, const Instruction& pass);
std::vector<Instruction> SendsOf(const PipelineShape& shape, const Instruction& pass);
// What follows the passes of a rank: tied parameters, the averages of their stages, the step.
std::vector<Instruction> EndOf(const PipelineShape& shape, int rank);

// All that a rank has to do, each once.
std::vector<Instruction> RequiredOf(const PipelineShape& shape, int rank);
// What a rank must have done before this instruction of its own.
std::vector<Instruction> NeedsOf(const PipelineShape& shape, int rank, const Instruction& of);

// A number that no other message between the same two ranks has, from 0 to below 2 x micro-batches
// x edges between these ranks: a tag. Precondition: a message of a good schedule.
int MessageNumber(const PipelineShape& shape, const Instruction& message);

// An index of a container.
inline std::size_t At(int number) { return static_cast<std::size_t>(number); }

}  // namespace sirtaki::parallel
