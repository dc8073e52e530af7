#include "parallel/schedule_check.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "parallel/schedule_text.h"

namespace sirtaki::parallel {
namespace {

using Kind = InstructionKind;

struct Place {
  int rank = 0;
  int index = 0;
};

std::string PlaceText(const Schedule& schedule, Place at) {
  const auto& all = schedule.ranks[At(at.rank)];
  const std::string rank = "rank " + std::to_string(at.rank);
  if (At(at.index) >= all.size()) return rank + ", behind its last instruction";
  return rank + ", instruction " + std::to_string(at.index) + ", " + Describe(all[At(at.index)]);
}

// Why an instruction has no place on a rank, whatever stands around it; empty if it has one.
std::string WhyNotHere(const PipelineShape& shape, int rank, const Instruction& instruction) {
  const auto& [kind, stage, micro_batch, peer, name] = instruction;
  if (!shape.training && kind != Kind::kForward &&
      (!instruction.is_message() || instruction.carries_gradient())) {
    return "it is for training, and this schedule is forward-only; leave it out";
  }
  if (kind == Kind::kStep) return "";
  if (kind == Kind::kReduceTied) {
    for (const Tie& tie : shape.ties) {
      const std::vector<int> ranks = shape.RanksOf(tie);
      if (tie.name != name || ranks.size() < 2) continue;
      if (std::count(ranks.begin(), ranks.end(), rank) > 0) return "";
    }
    return "this rank shares no such parameter with another rank; leave it out, or tie its stages";
  }
  for (const int given : {stage, instruction.is_message() ? peer : stage}) {
    if (given >= 0 && given < shape.stages) continue;
    return "there is no stage " + std::to_string(given) + "; allowed is 0 to " +
           std::to_string(shape.stages - 1);
  }
  if (kind != Kind::kAverage && (micro_batch < 0 || micro_batch >= shape.micro_batches)) {
    return "there is no micro-batch " + std::to_string(micro_batch) + "; allowed is 0 to " +
           std::to_string(shape.micro_batches - 1);
  }
  if (shape.RankOf(stage) != rank) {
    return "stage " + std::to_string(stage) + " is on rank " + std::to_string(shape.RankOf(stage)) +
           "; move it there";
  }
  if (!instruction.is_message()) return "";
  if (shape.RankOf(peer) == rank) return "both stages are on this rank; leave it out";
  const Edge edge = instruction.edge();
  const std::vector<Edge> edges = shape.OutputsOf(edge.from);
  if (std::find(edges.begin(), edges.end(), edge) != edges.end()) return "";
  return "nothing leads from stage " + std::to_string(edge.from) + " to stage " +
         std::to_string(edge.to) + (name.empty() ? "" : " under the name " + core::Quoted(name)) +
         "; leave it out, or add a skip connection";
}

class ScheduleJudge {
 public:
  explicit ScheduleJudge(const Schedule& schedule) : schedule_(schedule) {}

  // The steps of the check, in this order; each takes for granted what the one before has found good.
  bool Judge(const PassCosts& costs, ScheduleFacts* facts) {
    if (core::Status shape = CheckShape(schedule_.shape); !shape.ok()) {
      fault_ = shape.message();
      return false;
    }
    if (schedule_.ranks.size() != At(schedule_.shape.ranks)) {
      fault_ = "the schedule has instructions for " + std::to_string(schedule_.ranks.size()) +
               " ranks; give them for each of " + std::to_string(schedule_.shape.ranks);
      return false;
    }
    return Locate() && CheckNeeds() && CheckComplete() && Replay(costs, facts);
  }

  const std::string& fault() const { return fault_; }  // the first thing that is wrong

 private:
  const Instruction& Of(Place at) const { return schedule_.ranks[At(at.rank)][At(at.index)]; }
  int CountOn(int rank) const { return static_cast<int>(schedule_.ranks[At(rank)].size()); }

  bool Refuse(Place at, const std::string& why) {
    fault_ = PlaceText(schedule_, at) + ": " + why;
    return false;
  }

  // Each instruction can be on its rank, and is there once.
  bool Locate() {
    where_.resize(schedule_.ranks.size());
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      for (int i = 0; i < CountOn(rank); ++i) {
        const std::string why = WhyNotHere(schedule_.shape, rank, Of({rank, i}));
        if (!why.empty()) return Refuse({rank, i}, why);
        const auto [first, is_new] = where_[At(rank)].emplace(Of({rank, i}), i);
        if (!is_new) {
          return Refuse({rank, i}, "it is instruction " + std::to_string(first->second) +
                                       " already; leave one of the two out");
        }
      }
    }
    return true;
  }

  bool CheckNeeds() {
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      for (int i = 0; i < CountOn(rank); ++i) {
        for (const Instruction& need : NeedsOf(schedule_.shape, rank, Of({rank, i}))) {
          const auto found = where_[At(rank)].find(need);
          if (found == where_[At(rank)].end()) {
            return Refuse({rank, i}, "it needs " + Describe(need) +
                                         ", which this rank lacks; add that before it");
          }
          if (found->second > i) {
            return Refuse({rank, i}, "it needs " + Describe(need) + ", which is instruction " +
                                         std::to_string(found->second) +
                                         "; move that before this one");
          }
        }
      }
    }
    return true;
  }

  // What no other instruction of its rank needs may still lack: sends above all.
  bool CheckComplete() {
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      for (const Instruction& required : RequiredOf(schedule_.shape, rank)) {
        if (where_[At(rank)].contains(required)) continue;
        std::string why = "the rank lacks " + Describe(required);
        if (required.kind == Kind::kSend) {
          why += ", which rank " + std::to_string(schedule_.shape.RankOf(required.peer)) +
                 " would wait for";
        }
        const std::vector<Instruction> needs = NeedsOf(schedule_.shape, rank, required);
        why += needs.empty() ? "; add it" : "; add it behind " + Describe(needs.back());
        return Refuse({rank, CountOn(rank)}, why);
      }
    }
    return true;
  }

  // The instructions of other ranks that one waits for. A tied parameter's sum waits until the
  // other ranks have come to theirs: for what stands before that.
  std::vector<Place> WaitsOf(Place at) const {
    std::vector<Place> waits;
    const PipelineShape& shape = schedule_.shape;
    const Instruction& of = Of(at);
    const auto add = [&](int rank, const Instruction& other, int before) {
      waits.push_back({rank, where_[At(rank)].at(other) - before});
    };
    if (of.computes()) {
      for (const Instruction& receive : ReceivesOf(shape, of)) {
        add(shape.RankOf(receive.peer), receive.OtherEnd(), 0);
      }
    } else if (of.kind == Kind::kReduceTied) {
      for (const Tie& tie : shape.ties) {
        if (tie.name != of.name) continue;
        for (const int rank : shape.RanksOf(tie)) {
          if (rank != at.rank) add(rank, of, 1);
        }
      }
    }
    return waits;
  }

  // Runs the instructions of each rank in order, as far as they go. No order of the ranks or of
  // messages comes further or less far, since what was done once stays done.
  bool Replay(const PassCosts& costs, ScheduleFacts* facts) {
    done_.assign(schedule_.ranks.size(), 0);
    facts->spans.assign(schedule_.ranks.size(), {});
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
        while (done_[At(rank)] < CountOn(rank) && Advance(rank, costs, facts)) moved = true;
      }
    }
    for (int rank = 0; rank < schedule_.shape.ranks; ++rank) {
      if (done_[At(rank)] < CountOn(rank)) return RefuseCircle(rank);
    }
    return true;
  }

  bool Advance(int rank, const PassCosts& costs, ScheduleFacts* facts) {
    const Place at = {rank, done_[At(rank)]};
    auto& spans = facts->spans[At(rank)];
    double begin = spans.empty() ? 0 : spans.back().end;
    for (const Place& wait : WaitsOf(at)) {
      if (wait.index >= done_[At(wait.rank)]) return false;
      if (wait.index >= 0) begin = std::max(begin, facts->spans[At(wait.rank)][At(wait.index)].end);
    }
    spans.push_back({begin, begin + TimeOf(Of(at), costs)});
    ++done_[At(rank)];
    return true;
  }

  double TimeOf(const Instruction& pass, const PassCosts& costs) const {
    if (!pass.computes()) return 0;
    const double forward = costs.forward.empty() ? 1 : costs.forward[At(pass.stage)];
    if (pass.kind == Kind::kForward) return forward;
    const double backward = costs.backward.empty() ? 1 : costs.backward[At(pass.stage)];
    return schedule_.shape.Recomputes(pass.stage) ? forward + backward : backward;
  }

  // Follows the waits from a rank that is stuck until a rank comes again.
  bool RefuseCircle(int rank) {
    std::vector<int> way;
    std::vector<Place> waits;
    while (std::find(way.begin(), way.end(), rank) == way.end()) {
      way.push_back(rank);
      const std::vector<Place> of = WaitsOf({rank, done_[At(rank)]});
      waits.push_back(*std::find_if(of.begin(), of.end(), [&](const Place& wait) {
        return wait.index >= done_[At(wait.rank)];
      }));
      rank = waits.back().rank;
    }
    const auto first = std::find(way.begin(), way.end(), rank) - way.begin();
    std::string why = "ranks wait for each other in a circle";
    for (auto i = At(static_cast<int>(first)); i < way.size(); ++i) {
      why += "; rank " + std::to_string(way[i]) + " in instruction " +
             std::to_string(done_[At(way[i])]) + ", " +
             core::Quoted(Text(Of({way[i], done_[At(way[i])]}))) + ", for instruction " +
             std::to_string(waits[i].index) + " of rank " + std::to_string(waits[i].rank) + ", " +
             core::Quoted(Text(Of(waits[i])));
    }
    return Refuse({rank, done_[At(rank)]},
                  why + ". Move one that is waited for ahead of the one in which its rank waits");
  }

  const Schedule& schedule_;
  std::vector<std::map<Instruction, int>> where_;  // by rank
  std::vector<int> done_;                          // by rank: how many instructions
  std::string fault_;
};

// The share of the time in which a rank computes nothing.
void Measure(const Schedule& schedule, ScheduleFacts* facts) {
  std::vector<double> busy;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    busy.push_back(0);
    for (const auto& span : facts->spans[rank]) {
      busy.back() += span.end - span.begin;
      facts->length = std::max(facts->length, span.end);
    }
  }
  for (const double time : busy) {
    facts->idle.push_back(facts->length > 0 ? 1 - time / facts->length : 0);
  }
  facts->bubble = std::accumulate(facts->idle.begin(), facts->idle.end(), 0.0) /
                  static_cast<double>(facts->idle.size());
}

// What a rank holds while its instructions go by.
class RankMemory {
 public:
  RankMemory(const PipelineShape& shape, const PassCosts& costs) : shape_(shape), costs_(costs) {}

  void Run(const Instruction& of) {
    if (of.kind == Kind::kReceive) {
      Hold(0, 1, BytesOf(of));
    } else if (of.computes()) {
      Pass(of);
    }
  }

  int peak_activations = 0;
  int peak_receives = 0;
  std::int64_t peak_bytes = 0;

 private:
  void Hold(int activations, int receives, std::int64_t bytes) {
    activations_ += activations;
    receives_ += receives;
    bytes_ += bytes;
    peak_activations = std::max(peak_activations, activations_);
    peak_receives = std::max(peak_receives, receives_);
    peak_bytes = std::max(peak_bytes, bytes_);
  }

  // What a pass receives belongs to its activations when it is over, or is not needed any more.
  void Pass(const Instruction& pass) {
    const std::vector<Instruction> received = ReceivesOf(shape_, pass);
    std::int64_t received_bytes = 0;
    for (const Instruction& receive : received) received_bytes += BytesOf(receive);
    const std::int64_t whole =
        costs_.activation_bytes.empty() ? 0 : costs_.activation_bytes[At(pass.stage)];
    std::int64_t kept = whole;
    if (shape_.Recomputes(pass.stage)) {
      kept = 0;
      for (const Edge& edge : shape_.InputsOf(pass.stage)) kept += BytesOf(edge);
    }
    if (pass.kind == Kind::kForward) {
      Hold(1, -static_cast<int>(received.size()), kept - received_bytes);
      if (!shape_.training) Hold(-1, 0, -kept);
    } else {
      Hold(0, 0, whole - kept);  // recomputed, while the pass runs
      Hold(-1, -static_cast<int>(received.size()), -whole - received_bytes);
    }
  }

  std::int64_t BytesOf(const Edge& edge) const {
    const auto found = costs_.edge_bytes.find(edge);
    return found == costs_.edge_bytes.end() ? 0 : found->second;
  }
  std::int64_t BytesOf(const Instruction& message) const { return BytesOf(message.edge()); }

  const PipelineShape& shape_;
  const PassCosts& costs_;
  int activations_ = 0;
  int receives_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace

core::Status CheckSchedule(const Schedule& schedule, const PassCosts& costs, ScheduleFacts* facts) {
  *facts = {};
  ScheduleJudge judge(schedule);
  if (!judge.Judge(costs, facts)) return {core::StatusCode::kInvalidArgument, judge.fault()};
  Measure(schedule, facts);
  for (const std::vector<Instruction>& instructions : schedule.ranks) {
    RankMemory memory(schedule.shape, costs);
    for (const Instruction& instruction : instructions) memory.Run(instruction);
    facts->peak_activations.push_back(memory.peak_activations);
    facts->peak_receives.push_back(memory.peak_receives);
    facts->peak_bytes.push_back(memory.peak_bytes);
  }
  return core::Status::Ok();
}

}  // namespace sirtaki::parallel
