#include "tests/support/pipeline_simulation.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "parallel/schedule_text.h"

namespace sirtaki::tests {
namespace {

using parallel::At;
using parallel::Edge;
using parallel::Instruction;
using parallel::PipelineShape;
using parallel::Schedule;
using parallel::Tie;
using Kind = parallel::InstructionKind;

std::vector<Edge> EdgesOf(const PipelineShape& shape) {
  std::vector<Edge> edges = shape.skips;
  for (int s = 0; s + 1 < shape.stages; ++s) edges.push_back({s, s + 1, ""});
  return edges;
}

int RankOf(const PipelineShape& shape, int stage) {
  return shape.rank_of_stage.empty() ? stage % shape.ranks : shape.rank_of_stage[At(stage)];
}

std::set<int> RanksOfTie(const PipelineShape& shape, const Tie& tie) {
  std::set<int> ranks;
  for (const int stage : tie.stages) ranks.insert(RankOf(shape, stage));
  return ranks;
}

// What has to be done, and after what.
struct Item {
  std::vector<std::pair<int, Instruction>> places;  // several for what ranks do together
  std::vector<std::size_t> after;
};

class Work {
 public:
  explicit Work(const PipelineShape& shape) : shape_(shape) {
    for (int i = 0; i < shape.micro_batches; ++i) AddForward(i);
    if (!shape.training) return;
    for (int i = 0; i < shape.micro_batches; ++i) AddBackward(i);
    AddEnd();
  }

  std::vector<Item> items;

 private:
  using Key = std::tuple<Kind, int, int>;

  std::size_t Add(int rank, const Instruction& instruction, std::vector<std::size_t> after) {
    items.push_back({{{rank, instruction}}, std::move(after)});
    return items.size() - 1;
  }

  // Hands on what `from` has made to `to`: returns what `to` has to come after.
  std::vector<std::size_t> Hand(Kind kind, int from, int to, int i, const std::string& name) {
    const std::size_t made = passes_.at({kind, from, i});
    const int rank_from = RankOf(shape_, from);
    const int rank_to = RankOf(shape_, to);
    if (rank_from == rank_to) return {made};
    const std::size_t sent = Add(rank_from, {Kind::kSend, from, i, to, name}, {made});
    last_[rank_from].push_back(sent);
    return {sent, Add(rank_to, {Kind::kReceive, to, i, from, name}, {})};
  }

  void AddForward(int i) {
    for (int s = 0; s < shape_.stages; ++s) {
      std::vector<std::size_t> after;
      for (const Edge& edge : EdgesOf(shape_)) {
        if (edge.to != s) continue;
        for (const auto item : Hand(Kind::kForward, edge.from, s, i, edge.name)) {
          after.push_back(item);
        }
      }
      passes_[{Kind::kForward, s, i}] = Add(RankOf(shape_, s), {Kind::kForward, s, i}, after);
    }
  }

  void AddBackward(int i) {
    for (int s = shape_.stages - 1; s >= 0; --s) {
      std::vector<std::size_t> after = {passes_.at({Kind::kForward, s, i})};
      for (const Edge& edge : EdgesOf(shape_)) {
        if (edge.from != s) continue;
        for (const auto item : Hand(Kind::kBackward, edge.to, s, i, edge.name)) {
          after.push_back(item);
        }
      }
      passes_[{Kind::kBackward, s, i}] = Add(RankOf(shape_, s), {Kind::kBackward, s, i}, after);
    }
  }

  std::vector<std::size_t> BackwardOf(int stage) const {
    std::vector<std::size_t> all;
    for (int i = 0; i < shape_.micro_batches; ++i) {
      all.push_back(passes_.at({Kind::kBackward, stage, i}));
    }
    return all;
  }

  void AddEnd() {
    std::map<int, std::vector<std::size_t>> ties_of_stage;
    for (const Tie& tie : shape_.ties) {
      const std::set<int> ranks = RanksOfTie(shape_, tie);
      if (ranks.size() < 2) continue;
      Item together;
      for (const int rank : ranks) {
        together.places.push_back({rank, {Kind::kReduceTied, -1, -1, -1, tie.name}});
      }
      for (const int stage : tie.stages) {
        for (const std::size_t item : BackwardOf(stage)) together.after.push_back(item);
        ties_of_stage[stage].push_back(items.size());
      }
      items.push_back(together);
    }
    for (int s = 0; s < shape_.stages; ++s) {
      std::vector<std::size_t> after = BackwardOf(s);
      for (const std::size_t item : ties_of_stage[s]) after.push_back(item);
      last_[RankOf(shape_, s)].push_back(Add(RankOf(shape_, s), {Kind::kAverage, s}, after));
    }
    for (int rank = 0; rank < shape_.ranks; ++rank) Add(rank, {Kind::kStep}, last_[rank]);
  }

  const PipelineShape& shape_;
  std::map<Key, std::size_t> passes_;
  std::map<int, std::vector<std::size_t>> last_;  // by rank: what the step comes after
};

using Value = std::uint64_t;

Value Mix(Value a, Value b) {
  a ^= b + 0x9e3779b97f4a7c15U + (a << 6U) + (a >> 2U);
  return a * 0xff51afd7ed558ccdU;
}

Value Mix(Value a, const std::string& text) {
  for (const char c : text) a = Mix(a, static_cast<Value>(static_cast<unsigned char>(c)));
  return a;
}

Value Number(int number) { return static_cast<Value>(static_cast<unsigned>(number)); }

// What a pass computes from what it was given: the order of inputs does not matter.
Value PassOf(Kind kind, int stage, int i, Value inputs) {
  return Mix(Mix(Mix(Value{1} + static_cast<Value>(kind), Number(stage)), Number(i)), inputs);
}
// What of that goes over an edge.
Value Over(Value pass, int to, const std::string& name) { return Mix(Mix(pass, Number(to)), name); }

// The sum of each stage's gradients as one process has it.
std::vector<Value> OneProcess(const PipelineShape& shape) {
  std::vector<Value> sums(At(shape.stages), 0);
  for (int i = 0; i < shape.micro_batches; ++i) {
    std::vector<Value> forward(At(shape.stages), 0);
    std::vector<Value> backward(At(shape.stages), 0);
    for (int s = 0; s < shape.stages; ++s) {
      Value inputs = 0;
      for (const Edge& edge : EdgesOf(shape)) {
        if (edge.to == s) inputs += Over(forward[At(edge.from)], s, edge.name);
      }
      forward[At(s)] = PassOf(Kind::kForward, s, i, inputs);
      if (!shape.training) sums[At(s)] += forward[At(s)];
    }
    for (int s = shape.stages - 1; s >= 0 && shape.training; --s) {
      Value inputs = forward[At(s)];
      for (const Edge& edge : EdgesOf(shape)) {
        if (edge.from == s) inputs += Over(backward[At(edge.to)], s, edge.name);
      }
      backward[At(s)] = PassOf(Kind::kBackward, s, i, inputs);
      sums[At(s)] += backward[At(s)];
    }
  }
  return sums;
}

class Simulation {
 public:
  Simulation(const Schedule& schedule, Random& random)
      : schedule_(schedule),
        shape_(schedule.shape),
        random_(random),
        next_(schedule.ranks.size(), 0),
        sums_(At(shape_.stages), 0),
        averaged_(At(shape_.stages), 0) {}

  std::string Run() {
    while (problem_.empty()) {
      // Anything that can go on may be next: a rank, or a message on its way.
      std::vector<int> choices;
      for (int rank = 0; rank < shape_.ranks; ++rank) {
        if (!IsDone(rank) && CanGoOn(rank)) choices.push_back(rank);
      }
      for (int m = 0; m < static_cast<int>(under_way_.size()); ++m) {
        choices.push_back(shape_.ranks + m);
      }
      if (choices.empty()) break;
      const int choice = choices[At(RandomBelow(random_, static_cast<int>(choices.size())))];
      choice < shape_.ranks ? Step(choice) : Deliver(At(choice - shape_.ranks));
    }
    return problem_.empty() ? Judgement() : problem_;
  }

 private:
  using Message = std::tuple<int, int, std::string, int>;  // from, to, name, micro-batch

  const Instruction& NextOf(int rank) const { return schedule_.ranks[At(rank)][next_[At(rank)]]; }
  bool IsDone(int rank) const { return next_[At(rank)] == schedule_.ranks[At(rank)].size(); }

  struct Input {
    bool local = false;
    int from = 0;
    Message message;
  };
  std::vector<Input> InputsOf(const Instruction& pass) const {
    std::vector<Input> inputs;
    for (const Edge& edge : EdgesOf(shape_)) {
      const bool forward = pass.kind == Kind::kForward;
      if ((forward ? edge.to : edge.from) != pass.stage) continue;
      const int from = forward ? edge.from : edge.to;
      inputs.push_back({RankOf(shape_, from) == RankOf(shape_, pass.stage),
                        from,
                        {from, pass.stage, edge.name, pass.micro_batch}});
    }
    return inputs;
  }

  // A pass waits for messages whose receive is posted; a tied parameter's sum for the other ranks.
  bool CanGoOn(int rank) const {
    const Instruction& next = NextOf(rank);
    if (next.computes()) {
      for (const Input& input : InputsOf(next)) {
        if (!input.local && posted_.count(input.message) > 0 &&
            arrived_.count(input.message) == 0) {
          return false;
        }
      }
    }
    if (next.kind != Kind::kReduceTied) return true;
    for (const Tie& tie : shape_.ties) {
      if (tie.name != next.name) continue;
      for (const int other : RanksOfTie(shape_, tie)) {
        const bool is_there = !IsDone(other) && NextOf(other) == next;
        if (!is_there && summed_.count({other, next.name}) == 0) return false;
      }
    }
    return true;
  }

  void Fail(int rank, const std::string& what) {
    problem_ = "rank " + std::to_string(rank) + " in " + parallel::Text(NextOf(rank)) + ": " + what;
  }

  void Step(int rank) {
    const Instruction of = NextOf(rank);
    switch (of.kind) {
      case Kind::kForward:
      case Kind::kBackward:
        Compute(rank, of);
        break;
      case Kind::kSend: {
        const Kind kind = of.peer > of.stage ? Kind::kForward : Kind::kBackward;
        const auto made = made_.find({kind, of.stage, of.micro_batch});
        if (made == made_.end()) return Fail(rank, "there is nothing to send");
        under_way_.push_back(
            {{of.stage, of.peer, of.name, of.micro_batch}, Over(made->second, of.peer, of.name)});
        break;
      }
      case Kind::kReceive:
        if (!posted_.insert({of.peer, of.stage, of.name, of.micro_batch}).second) {
          return Fail(rank, "it is posted twice");
        }
        break;
      case Kind::kReduceTied:
        summed_.insert({rank, of.name});
        break;
      case Kind::kAverage:
        ++averaged_[At(of.stage)];
        if (left_[of.stage] != shape_.micro_batches) return Fail(rank, "gradients are missing");
        for (const Tie& tie : shape_.ties) {
          if (std::count(tie.stages.begin(), tie.stages.end(), of.stage) > 0 &&
              RanksOfTie(shape_, tie).size() > 1 && summed_.count({rank, tie.name}) == 0) {
            return Fail(rank, "a tied parameter is not summed yet");
          }
        }
        break;
      case Kind::kStep:
        ++steps_;
        break;
    }
    ++next_[At(rank)];
  }

  void Compute(int rank, const Instruction& of) {
    if (RankOf(shape_, of.stage) != rank) return Fail(rank, "the stage is elsewhere");
    Value inputs = 0;
    if (of.kind == Kind::kBackward) {
      const auto forward = made_.find({Kind::kForward, of.stage, of.micro_batch});
      if (forward == made_.end()) return Fail(rank, "there was no forward pass");
      inputs = forward->second;
    }
    for (const Input& input : InputsOf(of)) {
      if (input.local) {
        const auto made = made_.find({of.kind, input.from, of.micro_batch});
        if (made == made_.end()) return Fail(rank, "an input was not made");
        inputs += Over(made->second, of.stage, std::get<2>(input.message));
      } else if (posted_.count(input.message) == 0) {
        return Fail(rank, "no receive is posted");
      } else {
        inputs += arrived_.at(input.message);
        arrived_.erase(input.message);
      }
    }
    const Value value = PassOf(of.kind, of.stage, of.micro_batch, inputs);
    if (!made_.insert({{of.kind, of.stage, of.micro_batch}, value}).second) {
      return Fail(rank, "it was done before");
    }
    if (of.kind == Kind::kBackward || !shape_.training) {
      sums_[At(of.stage)] += value;
      ++left_[of.stage];
    }
  }

  void Deliver(std::size_t which) {
    const auto [message, value] = under_way_[which];
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(which));
    if (!arrived_.insert({message, value}).second) problem_ = "a message came twice";
  }

  std::string Judgement() const {
    std::string waiting;
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      if (!IsDone(rank)) {
        waiting += " rank " + std::to_string(rank) + " in " + parallel::Text(NextOf(rank));
      }
    }
    if (!waiting.empty()) return "hang:" + waiting;
    if (sums_ != OneProcess(shape_)) return "the sums of gradients are wrong";
    if (!arrived_.empty()) return "a message was not used";
    const int updates = shape_.training ? 1 : 0;
    if (steps_ != updates * shape_.ranks) return "the number of steps is wrong";
    if (std::any_of(averaged_.begin(), averaged_.end(), [&](int n) { return n != updates; })) {
      return "a stage was not averaged once";
    }
    return "";
  }

  const Schedule& schedule_;
  const PipelineShape& shape_;
  Random& random_;
  std::vector<std::size_t> next_;                     // by rank
  std::map<std::tuple<Kind, int, int>, Value> made_;  // kind, stage, micro-batch
  std::vector<std::pair<Message, Value>> under_way_;
  std::map<Message, Value> arrived_;
  std::set<Message> posted_;
  std::set<std::pair<int, std::string>> summed_;
  std::vector<Value> sums_;  // by stage
  std::map<int, int> left_;
  std::vector<int> averaged_;
  int steps_ = 0;
  std::string problem_;
};

}  // namespace

int RandomBelow(Random& random, int limit) {
  return std::uniform_int_distribution<int>(0, limit - 1)(random);
}

parallel::PipelineShape RandomShape(Random& random) {
  PipelineShape shape;
  shape.stages = 1 + RandomBelow(random, 7);
  shape.ranks = 1 + RandomBelow(random, std::min(shape.stages, 4));
  shape.micro_batches = 1 + RandomBelow(random, 5);
  shape.training = RandomBelow(random, 8) != 0;
  for (int s = 0; s < shape.stages; ++s) {
    shape.rank_of_stage.push_back(s < shape.ranks ? s : RandomBelow(random, shape.ranks));
  }
  std::shuffle(shape.rank_of_stage.begin(), shape.rank_of_stage.end(), random);
  for (int from = 0; from < shape.stages; ++from) {
    for (int to = from + 1; to < shape.stages; ++to) {
      if (RandomBelow(random, 5) == 0) shape.skips.push_back({from, to, "skip.a"});
      if (RandomBelow(random, 10) == 0) shape.skips.push_back({from, to, "b"});
    }
  }
  for (const char* name : {"wte", "head.weight"}) {
    Tie tie{name, {}};
    for (int s = 0; s < shape.stages; ++s) {
      if (RandomBelow(random, 3) == 0) tie.stages.push_back(s);
    }
    if (tie.stages.size() > 1) shape.ties.push_back(tie);
  }
  for (int s = 0; s < shape.stages; ++s) {
    if (RandomBelow(random, 4) == 0) shape.recomputed.push_back(s);
  }
  return shape;
}

parallel::Schedule RandomSchedule(const PipelineShape& shape, Random& random) {
  const Work work(shape);
  std::vector<std::size_t> left;                                    // by item
  std::vector<std::vector<std::size_t>> before(work.items.size());  // whom it holds up
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < work.items.size(); ++i) {
    left.push_back(work.items[i].after.size());
    for (const std::size_t other : work.items[i].after) before[other].push_back(i);
    if (left[i] == 0) ready.push_back(i);
  }
  Schedule schedule{shape, std::vector<std::vector<Instruction>>(At(shape.ranks))};
  while (!ready.empty()) {
    std::swap(ready[At(RandomBelow(random, static_cast<int>(ready.size())))], ready.back());
    const std::size_t item = ready.back();
    ready.pop_back();
    for (const auto& [rank, instruction] : work.items[item].places) {
      schedule.ranks[At(rank)].push_back(instruction);
    }
    for (const std::size_t other : before[item]) {
      if (--left[other] == 0) ready.push_back(other);
    }
  }
  return schedule;
}

std::string Simulate(const parallel::Schedule& schedule, Random& random) {
  return Simulation(schedule, random).Run();
}

}  // namespace sirtaki::tests
