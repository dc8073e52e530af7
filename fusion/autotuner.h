// Searches for the values of options with which steps are shortest, while a program trains.
//
// One option after the other is moved up or down its list of values. A value is tried against the
// one that stands, in turn (old, new, old, new, …), so that what else happens on the machine weighs
// on both alike, and wins only if the median of its steps is shorter by a margin. A value that wins
// is followed in the same direction. It ends when no option has moved in a round, or after so many
// trials. Pure: it is told how long steps took.
//
// Why so: there are few options, each with one best value in the middle, and a step's time varies
// more from one minute to the next than between neighbouring values. A model of the whole surface
// (Horovod fits a Gaussian process) would be fitted to that noise; pairs cancel it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sirtaki::fusion {

struct TunedOption {
  std::string name;
  std::vector<std::int64_t> values;  // ascending
  std::size_t start = 0;             // index of the first one
};

struct AutotunerOptions {
  int warmup_steps = 5;  // after the start: caches and memory settle
  int settle_steps = 1;  // after each change: not counted
  int steps = 5;         // of one turn
  int turns = 2;         // of each value in a trial
  double margin = 0.02;  // by which a new value has to be better, as a part of the old one's time
  int max_trials = 40;

  // After that many a search has ended.
  int most_steps() const { return warmup_steps + max_trials * 2 * turns * (steps + settle_steps); }
};

// The tuner is not thread-safe.
class Autotuner {
 public:
  // A trial is over with this result.
  struct Trial {
    std::string option;
    std::int64_t from = 0;
    std::int64_t to = 0;
    double from_seconds = 0;  // medians
    double to_seconds = 0;
    bool accepted = false;
  };

  // `options`: at least one, each with a value.
  Autotuner(std::vector<TunedOption> options, const AutotunerOptions& how);

  // A step with values() took so long. They may be others then.
  void AddStep(double seconds);

  // The next step is to run with these values, by option.
  std::vector<std::int64_t> values() const;
  bool finished() const { return finished_; }
  // The trials that are over, in order.
  const std::vector<Trial>& trials() const { return trials_; }
  // What a step took with the first values, and takes with those that stand: as the trials compare
  // them, so that a machine that has become slower meanwhile does not count. 0 before a trial is
  // over.
  double first_seconds() const;
  double standing_seconds() const;

  // "option,from,to,from_ms,to_ms,accepted" and a line for each trial.
  std::string Csv() const;

 private:
  void BeginNextTrial(bool follow);
  bool Propose(int direction);
  void EndTurn();

  const AutotunerOptions how_;
  const std::vector<TunedOption> options_;
  std::vector<std::size_t> standing_;  // index of the value, by option
  std::size_t option_ = 0;             // that is being moved
  std::size_t proposed_ = 0;           // index of the value that is tried
  int direction_ = +1;
  bool moved_here_ = false;   // this option, since it has its turn
  std::size_t still_ = 0;     // options in a row that have not moved
  bool trying_ = false;       // the steps now run with the proposed value
  int turns_left_ = 0;        // of the trial
  int ignored_;               // steps that do not count
  std::vector<double> turn_;  // the steps of this one
  std::vector<double> old_steps_;
  std::vector<double> new_steps_;
  std::vector<Trial> trials_;
  bool finished_ = false;
};

}  // namespace sirtaki::fusion
