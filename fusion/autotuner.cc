#include "fusion/autotuner.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

#include "core/base/check.h"

namespace sirtaki::fusion {

namespace {

double Median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

}  // namespace

Autotuner::Autotuner(std::vector<TunedOption> options, const AutotunerOptions& how)
    : how_(how), options_(std::move(options)), ignored_(how.warmup_steps + how.settle_steps) {
  SIRTAKI_CHECK(!options_.empty(), "there is an option to tune");
  for (const TunedOption& option : options_) {
    SIRTAKI_CHECK(option.start < option.values.size(), "the first value is in the list");
    standing_.push_back(option.start);
  }
  BeginNextTrial(/*follow=*/false);
}

std::vector<std::int64_t> Autotuner::values() const {
  std::vector<std::int64_t> values;
  for (std::size_t i = 0; i < options_.size(); ++i) {
    const bool tried = trying_ && i == option_;
    values.push_back(options_[i].values[tried ? proposed_ : standing_[i]]);
  }
  return values;
}

void Autotuner::AddStep(double seconds) {
  if (finished_) return;
  if (ignored_ > 0) {
    --ignored_;
    return;
  }
  turn_.push_back(seconds);
  if (turn_.size() >= static_cast<std::size_t>(how_.steps)) EndTurn();
}

void Autotuner::EndTurn() {
  std::vector<double>& steps = trying_ ? new_steps_ : old_steps_;
  steps.insert(steps.end(), turn_.begin(), turn_.end());
  turn_.clear();
  ignored_ = how_.settle_steps;
  trying_ = !trying_;
  if (--turns_left_ > 0) return;
  const TunedOption& option = options_[option_];
  Trial trial{option.name,
              option.values[standing_[option_]],
              option.values[proposed_],
              Median(old_steps_),
              Median(new_steps_),
              false};
  trial.accepted = trial.to_seconds < trial.from_seconds * (1 - how_.margin);
  trials_.push_back(trial);
  if (trial.accepted) {
    standing_[option_] = proposed_;
    moved_here_ = true;
  }
  BeginNextTrial(trial.accepted);
}

// The proposal lies in the current direction from the value that stands; false at the end of the
// list.
bool Autotuner::Propose(int direction) {
  const std::size_t here = standing_[option_];
  if (direction < 0 ? here == 0 : here + 1 == options_[option_].values.size()) return false;
  direction_ = direction;
  proposed_ = direction < 0 ? here - 1 : here + 1;
  return true;
}

// After a trial in one direction: further if it was won, else the other way, unless it has come
// from there; then the next option has its turn.
void Autotuner::BeginNextTrial(bool follow) {
  trying_ = false;
  old_steps_.clear();
  new_steps_.clear();
  turns_left_ = 2 * how_.turns;
  if (static_cast<int>(trials_.size()) >= how_.max_trials) {
    finished_ = true;
    return;
  }
  const bool begins = trials_.empty();
  if (follow && Propose(direction_)) return;
  if (begins && Propose(+1)) return;
  if ((begins || (!follow && !moved_here_ && direction_ > 0)) && Propose(-1)) return;
  for (;;) {
    still_ = moved_here_ ? 0 : still_ + 1;
    moved_here_ = false;
    // The option that moved last need not be looked at again if no other has moved since.
    if (still_ >= options_.size()) {
      finished_ = true;
      return;
    }
    option_ = (option_ + 1) % options_.size();
    if (Propose(+1) || Propose(-1)) return;
  }
}

double Autotuner::first_seconds() const {
  return trials_.empty() ? 0 : trials_.front().from_seconds;
}

double Autotuner::standing_seconds() const {
  double seconds = first_seconds();
  for (const Trial& trial : trials_) {
    if (trial.accepted) seconds *= trial.to_seconds / trial.from_seconds;
  }
  return seconds;
}

std::string Autotuner::Csv() const {
  std::ostringstream text;
  text << "option,from,to,from_ms,to_ms,accepted\n" << std::fixed << std::setprecision(4);
  for (const Trial& trial : trials_) {
    text << trial.option << ',' << trial.from << ',' << trial.to << ',' << trial.from_seconds * 1e3
         << ',' << trial.to_seconds * 1e3 << ',' << (trial.accepted ? "yes" : "no") << '\n';
  }
  return text.str();
}

}  // namespace sirtaki::fusion
