#include "core/base/status.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::core {
namespace {

// That the message has "rank 3" or "ranks 3-5", and not "rank 31".
bool NamesRank(const std::string& message, int rank) {
  for (const char* const word : {"rank ", "ranks "}) {
    const std::string text = word + std::to_string(rank);
    for (std::size_t at = message.find(text); at != std::string::npos;
         at = message.find(text, at + 1)) {
      const std::size_t end = at + text.size();
      if (end == message.size() || message[end] < '0' || message[end] > '9') return true;
    }
  }
  return false;
}

// What stands for a call without a name ("unnamed call #7") stands without quotes.
bool NamesTensor(const std::string& message, const std::string& tensor) {
  return message.find(Quoted(tensor)) != std::string::npos ||
         (tensor.find(' ') != std::string::npos && message.find(tensor) != std::string::npos);
}

// The status is made before it is needed, and not destroyed: where memory has run out, a copy of it
// takes none.
const Status& out_of_memory = *new Status(StatusCode::kBackend, "out of host memory");

}  // namespace

std::string_view StatusCodeName(StatusCode code) {
  // The names are in the order of StatusCode.
  // clang-format off
  static constexpr std::string_view kNames[] = {
      "ok", "invalid argument", "mismatch", "not initialized", "duplicate name", "shut down",
      "peer lost", "timed out", "aborted", "backend failure", "protocol error", "unsupported",
      "invalid argument"};
  // clang-format on
  static_assert(std::size(kNames) == static_cast<std::size_t>(kLastStatusCode) + 1);
  return NameIn(kNames, code);
}

Status::Status(StatusCode code, std::string message, Origin origin)
    : said_(std::make_shared<const All>(All{code, std::move(message), std::move(origin)})) {}

const Status::All& Status::Said() const {
  static const All& none = *new All();  // not destroyed: threads that are left behind may ask
  return said_ == nullptr ? none : *said_;
}

std::string Status::ToString() const {
  std::string text(StatusCodeName(code()));
  if (ok()) return text;
  const std::string& message = Said().message;
  const Origin& origin = Said().origin;
  if (!message.empty()) text += ": " + message;

  std::string from;
  if (origin.rank >= 0 && !(origin.host.empty() && NamesRank(message, origin.rank))) {
    from = "rank " + std::to_string(origin.rank);
  }
  if (!origin.host.empty()) from += (from.empty() ? "host " : " on host ") + origin.host;
  if (!from.empty()) from.insert(0, "from ");
  // Most messages name the tensor themselves; twice would read badly.
  if (!origin.tensor.empty() && !NamesTensor(message, origin.tensor)) {
    from += (from.empty() ? "tensor " : ", tensor ") + Quoted(origin.tensor);
  }
  if (!from.empty()) text += " (" + from + ")";
  return text;
}

Status StatusOfException() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  } catch (const std::exception& error) {
    return {StatusCode::kBackend, error.what()};
  } catch (...) {
    return {StatusCode::kBackend, "an exception of unknown type"};
  }
}

Status FirstFailure(std::span<const Status> by_rank) {
  const auto failed = std::find_if(by_rank.begin(), by_rank.end(),
                                   [](const Status& status) { return !status.ok(); });
  if (failed == by_rank.end()) return Status::Ok();
  const auto same = [&](const Status& status) {
    return status.code() == failed->code() && status.message() == failed->message();
  };
  if (std::all_of(by_rank.begin(), by_rank.end(), same)) return {failed->code(), failed->message()};
  const auto rank = static_cast<int>(failed - by_rank.begin());
  return {failed->code(), "rank " + std::to_string(rank) + " cannot start: " + failed->message(),
          Origin{rank, {}, {}}};
}

}  // namespace sirtaki::core
