// An engine does what other threads ask of it, and ends, well or badly.
#include <cstddef>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "core/engine/engine.h"

namespace sirtaki::core {
namespace {

// How long the last messages of a session may take to leave this process.
constexpr Duration kLastWordTime = std::chrono::seconds(10);

}  // namespace

// ---- commands ----

void Engine::CarryOut(const std::vector<Command>& commands, TimePoint now) {
  for (const Command& command : commands) {
    if (const auto* const why = std::get_if<std::string>(&command)) {
      trace_.Left(*why, now);
      negotiator_.Leave(*why, now);
    } else {
      negotiator_.RaiseFault(std::get<Status>(command));
    }
  }
}

// ---- the end ----

void Engine::NoticeFault() {
  const bool first = !fault_.failed();
  if (!first && negotiator_.cause() == noticed_cause_) return;
  noticed_cause_ = negotiator_.cause();  // an earlier one may have come from elsewhere
  const Status why = InWords(noticed_cause_.ToStatus());
  fault_.Agree(why);
  if (!first) return;
  trace_.Failed(why, Now());
  running_at_fault_ = executor_.Running();
  if (options_.observer != nullptr) doing_at_fault_ = options_.observer->doing.Text(Now());
  executor_.Abandon(why);  // first: who finds a handle failed may write to what others run with
  queue_.Close(why);
  timed_calls_.Clear();
  if (options_.on_fault) options_.on_fault(why);
  fault_.NoteFailed();
  transport_.Wake();
}

void Engine::NoticeEnd(TimePoint now) {
  if (closed_ || !negotiator_.closed()) return;
  // The confirmation to the children has to leave this process; a child that takes none is not
  // waited for longer than a lost peer would be.
  if (!ended_since_) ended_since_ = now;
  if (!flushed_ && now - *ended_since_ < kLastWordTime) return;
  queue_.Close({StatusCode::kNotInitialized, "shutdown() has ended this session"});
  closed_ = true;
  transport_.Wake();
}

Status Engine::InWords(const Status& why) const {
  if (!options_.in_words) return why;
  const std::string& text = why.message();
  Origin origin = why.origin();
  // The tensor is told without its set, and so are buckets of different sets; the text has it.
  const std::string& tensor = origin.tensor;
  if (const std::size_t at = text.find(tensor); !tensor.empty() && at != std::string::npos) {
    constexpr std::string_view kOfSet = " of process set ";
    std::size_t end = at + tensor.size();
    if (text.compare(end, kOfSet.size(), kOfSet) == 0) {
      end = text.find_first_not_of("0123456789", end + kOfSet.size());
    }
    std::string key = text.substr(at, end - at);
    std::string words = options_.in_words(key);
    if (words != key) origin.tensor = std::move(words);
  }
  return {why.code(), options_.in_words(text), std::move(origin)};
}

// Fails what is pending here at once; the others learn it by the next round. A medium may tell of
// another rank's fault before its message comes.
void Engine::PostFailure(const Status& failure, const std::string& tensor) {
  Origin origin = failure.origin();
  if (origin.rank < 0 || origin.rank == options_.rank) origin = {options_.rank, options_.host, {}};
  origin.tensor = tensor;
  // A fault is never ok, whatever its code says.
  const StatusCode code = failure.ok() ? StatusCode::kAborted : failure.code();
  const Status told(code, failure.message(), std::move(origin));
  const Status why = InWords(told);
  if (!fault_.Set(why)) return;
  try {
    executor_.Abandon(why);
  } catch (const std::bad_alloc&) {
    // The next round abandons it.
  }
  queue_.Close(why);
  Post(told);
}

void Engine::Post(Command command) {
  commands_.Post(std::move(command));
  driver_.WakeSomebody();
}

}  // namespace sirtaki::core
