#include "parallel/schedule.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "core/base/text.h"

namespace sirtaki::parallel {
namespace {

using Kind = InstructionKind;
using Instructions = std::vector<Instruction>;

core::Status WrongShape(const std::string& text) {
  return {core::StatusCode::kInvalidArgument, text};
}

// Whether a name can stand in the text of an instruction.
bool IsWord(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(),
                                      [](char c) { return c > ' ' && c < 127 && c != '#'; });
}

core::Status CheckPlaces(const PipelineShape& shape) {
  const std::string stages = std::to_string(shape.stages);
  if (shape.stages < 1 || shape.ranks < 1 || shape.micro_batches < 1) {
    return WrongShape("a pipeline has at least one stage, one rank and one micro-batch, not " +
                      stages + ", " + std::to_string(shape.ranks) + " and " +
                      std::to_string(shape.micro_batches));
  }
  if (!shape.rank_of_stage.empty() && shape.rank_of_stage.size() != At(shape.stages)) {
    return WrongShape("the ranks of " + std::to_string(shape.rank_of_stage.size()) +
                      " stages are given; give the rank of each of " + stages);
  }
  for (const int rank : shape.rank_of_stage) {
    if (rank < 0 || rank >= shape.ranks) {
      return WrongShape("a stage is placed on rank " + std::to_string(rank) + "; allowed is 0 to " +
                        std::to_string(shape.ranks - 1));
    }
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    if (shape.StagesOf(rank).empty()) {
      return WrongShape("rank " + std::to_string(rank) + " has none of the " + stages +
                        " stages; use fewer ranks or place a stage there");
    }
  }
  return core::Status::Ok();
}

core::Status CheckSkips(const PipelineShape& shape) {
  for (const Edge& skip : shape.skips) {
    const std::string what = "the skip connection " + core::Quoted(skip.name) + " from stage " +
                             std::to_string(skip.from) + " to stage " + std::to_string(skip.to);
    if (!IsWord(skip.name)) return WrongShape(what + " needs a name of letters without spaces");
    if (skip.from < 0 || skip.from >= skip.to || skip.to >= shape.stages) {
      return WrongShape(what + " has to lead to a later one of the stages 0 to " +
                        std::to_string(shape.stages - 1));
    }
    if (std::count(shape.skips.begin(), shape.skips.end(), skip) > 1) {
      return WrongShape(what + " is there twice; hand on several tensors as one tuple");
    }
  }
  return core::Status::Ok();
}

core::Status CheckTies(const PipelineShape& shape) {
  std::set<std::string> names;
  for (const Tie& tie : shape.ties) {
    const std::string what = "the tied parameter " + core::Quoted(tie.name);
    if (!IsWord(tie.name)) return WrongShape(what + " needs a name of letters without spaces");
    if (!names.insert(tie.name).second) {
      return WrongShape(what + " is there twice; name all its stages once");
    }
    const std::set<int> stages(tie.stages.begin(), tie.stages.end());
    if (stages.size() != tie.stages.size() || stages.size() < 2 || *stages.begin() < 0 ||
        *stages.rbegin() >= shape.stages) {
      return WrongShape(what + " needs two or more different ones of the stages 0 to " +
                        std::to_string(shape.stages - 1));
    }
  }
  return core::Status::Ok();
}

// The messages of a stage for one micro-batch over these edges.
Instructions MessagesOver(const PipelineShape& shape, Kind kind, const std::vector<Edge>& edges,
                          const Instruction& pass) {
  Instructions messages;
  for (const Edge& edge : edges) {
    const int peer = edge.from == pass.stage ? edge.to : edge.from;
    if (shape.RankOf(peer) == shape.RankOf(pass.stage)) continue;
    messages.push_back({kind, pass.stage, pass.micro_batch, peer, edge.name});
  }
  return messages;
}

void Append(const Instructions& more, Instructions* all) {
  all->insert(all->end(), more.begin(), more.end());
}

void AppendBackward(const PipelineShape& shape, int stage, Instructions* all) {
  for (int i = 0; i < shape.micro_batches; ++i) all->push_back({Kind::kBackward, stage, i});
}

// A pass needs what other stages of its rank hand to it, and that the receives of the rest are posted.
Instructions NeedsOfPass(const PipelineShape& shape, int rank, const Instruction& pass) {
  const bool forward = pass.kind == Kind::kForward;
  Instructions needs;
  if (!forward) needs.push_back({Kind::kForward, pass.stage, pass.micro_batch});
  for (const Edge& edge : forward ? shape.InputsOf(pass.stage) : shape.OutputsOf(pass.stage)) {
    const int other = forward ? edge.from : edge.to;
    if (shape.RankOf(other) == rank) needs.push_back({pass.kind, other, pass.micro_batch});
  }
  Append(ReceivesOf(shape, pass), &needs);
  return needs;
}

}  // namespace

int PipelineShape::RankOf(int stage) const {
  return rank_of_stage.empty() ? stage % ranks : rank_of_stage[At(stage)];
}

std::vector<int> PipelineShape::StagesOf(int rank) const {
  std::vector<int> found;
  for (int stage = 0; stage < stages; ++stage) {
    if (RankOf(stage) == rank) found.push_back(stage);
  }
  return found;
}

bool PipelineShape::Recomputes(int stage) const {
  return std::find(recomputed.begin(), recomputed.end(), stage) != recomputed.end();
}

std::vector<Edge> PipelineShape::InputsOf(int stage) const {
  std::vector<Edge> edges;
  if (stage > 0) edges.push_back({stage - 1, stage, ""});
  std::copy_if(skips.begin(), skips.end(), std::back_inserter(edges),
               [&](const Edge& skip) { return skip.to == stage; });
  return edges;
}

std::vector<Edge> PipelineShape::OutputsOf(int stage) const {
  std::vector<Edge> edges;
  if (stage + 1 < stages) edges.push_back({stage, stage + 1, ""});
  std::copy_if(skips.begin(), skips.end(), std::back_inserter(edges),
               [&](const Edge& skip) { return skip.from == stage; });
  return edges;
}

std::vector<int> PipelineShape::RanksOf(const Tie& tie) const {
  std::set<int> found;
  for (const int stage : tie.stages) found.insert(RankOf(stage));
  return {found.begin(), found.end()};
}

bool PipelineShape::IsTied(int stage) const {
  return std::any_of(ties.begin(), ties.end(), [&](const Tie& tie) {
    return RanksOf(tie).size() > 1 && std::count(tie.stages.begin(), tie.stages.end(), stage) > 0;
  });
}

core::Status CheckShape(const PipelineShape& shape) {
  core::Status status = CheckPlaces(shape);
  if (status.ok()) status = CheckSkips(shape);
  if (status.ok()) status = CheckTies(shape);
  for (const int stage : shape.recomputed) {
    if (status.ok() && (stage < 0 || stage >= shape.stages)) {
      return WrongShape("stage " + std::to_string(stage) +
                        " cannot be recomputed; the stages are 0 to " +
                        std::to_string(shape.stages - 1));
    }
  }
  return status;
}

bool Instruction::computes() const { return kind == Kind::kForward || kind == Kind::kBackward; }

bool Instruction::is_message() const { return kind == Kind::kSend || kind == Kind::kReceive; }

bool Instruction::carries_gradient() const { return (kind == Kind::kSend) == (peer < stage); }

Instruction Instruction::OtherEnd() const {
  return {kind == Kind::kSend ? Kind::kReceive : Kind::kSend, peer, micro_batch, stage, name};
}

Edge Instruction::edge() const { return {std::min(stage, peer), std::max(stage, peer), name}; }

std::vector<Instruction> ReceivesOf(const PipelineShape& shape, const Instruction& pass) {
  const bool forward = pass.kind == Kind::kForward;
  return MessagesOver(shape, Kind::kReceive,
                      forward ? shape.InputsOf(pass.stage) : shape.OutputsOf(pass.stage), pass);
}

std::vector<Instruction> SendsOf(const PipelineShape& shape, const Instruction& pass) {
  const bool forward = pass.kind == Kind::kForward;
  return MessagesOver(shape, Kind::kSend,
                      forward ? shape.OutputsOf(pass.stage) : shape.InputsOf(pass.stage), pass);
}

std::vector<Instruction> EndOf(const PipelineShape& shape, int rank) {
  Instructions end;
  if (!shape.training) return end;
  for (const Tie& tie : shape.ties) {
    const std::vector<int> ranks = shape.RanksOf(tie);
    if (ranks.size() > 1 && std::count(ranks.begin(), ranks.end(), rank) > 0) {
      end.push_back({Kind::kReduceTied, -1, -1, -1, tie.name});
    }
  }
  for (const int stage : shape.StagesOf(rank)) {
    if (shape.IsTied(stage)) end.push_back({Kind::kAverage, stage});
  }
  end.push_back({Kind::kStep});
  return end;
}

std::vector<Instruction> RequiredOf(const PipelineShape& shape, int rank) {
  Instructions all;
  for (const int stage : shape.StagesOf(rank)) {
    for (int i = 0; i < shape.micro_batches; ++i) {
      for (const Kind kind : {Kind::kForward, Kind::kBackward}) {
        if (kind == Kind::kBackward && !shape.training) continue;
        const Instruction pass = {kind, stage, i};
        Append(ReceivesOf(shape, pass), &all);
        all.push_back(pass);
        Append(SendsOf(shape, pass), &all);
      }
    }
    if (shape.training && !shape.IsTied(stage)) all.push_back({Kind::kAverage, stage});
  }
  Append(EndOf(shape, rank), &all);
  return all;
}

std::vector<Instruction> NeedsOf(const PipelineShape& shape, int rank, const Instruction& of) {
  Instructions needs;
  switch (of.kind) {
    case Kind::kForward:
    case Kind::kBackward:
      return NeedsOfPass(shape, rank, of);
    case Kind::kSend:
      return {{of.carries_gradient() ? Kind::kBackward : Kind::kForward, of.stage, of.micro_batch}};
    case Kind::kReceive:
      break;
    case Kind::kReduceTied:
      for (const Tie& tie : shape.ties) {
        if (tie.name != of.name) continue;
        for (const int stage : tie.stages) {
          if (shape.RankOf(stage) == rank) AppendBackward(shape, stage, &needs);
        }
      }
      break;
    case Kind::kAverage:
      AppendBackward(shape, of.stage, &needs);
      for (const Tie& tie : shape.ties) {
        if (std::count(tie.stages.begin(), tie.stages.end(), of.stage) > 0 &&
            shape.RanksOf(tie).size() > 1) {
          needs.push_back({Kind::kReduceTied, -1, -1, -1, tie.name});
        }
      }
      break;
    case Kind::kStep:
      needs = RequiredOf(shape, rank);
      needs.pop_back();  // the step itself
      break;
  }
  return needs;
}

int MessageNumber(const PipelineShape& shape, const Instruction& message) {
  const auto ranks_of = [&](int from, int to) {
    return std::minmax({shape.RankOf(from), shape.RankOf(to)});
  };
  const Edge edge = message.edge();
  const auto ranks = ranks_of(edge.from, edge.to);
  int before = 0;  // edges between the same two ranks
  for (int stage = 0; stage < shape.stages; ++stage) {
    for (const Edge& other : shape.OutputsOf(stage)) {
      if (other == edge) {
        return (2 * before + (message.carries_gradient() ? 1 : 0)) * shape.micro_batches +
               message.micro_batch;
      }
      if (ranks_of(other.from, other.to) == ranks) ++before;
    }
  }
  return -1;
}

}  // namespace sirtaki::parallel
