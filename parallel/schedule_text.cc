#include "parallel/schedule_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <vector>

#include "core/base/text.h"
#include "core/base/words.h"
#include "parallel/schedule_kinds.h"

namespace sirtaki::parallel {
namespace {

using Kind = InstructionKind;

constexpr std::string_view kLetters = "FBSRTA";  // by kind; a step has none

core::Status WrongText(int line, const std::string& text) {
  return {core::StatusCode::kInvalidArgument,
          "line " + std::to_string(line) + " of the schedule: " + text};
}

// Takes a number off the front of a text.
bool TakeNumber(std::string_view* text, int* number) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc() || *number < 0) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return true;
}

bool TakeCharacter(std::string_view* text, char character) {
  if (text->empty() || text->front() != character) return false;
  text->remove_prefix(1);
  return true;
}

bool TakeMessage(std::string_view* word, Instruction* message) {
  int from = 0;
  int to = 0;
  if (!TakeNumber(word, &from) || !TakeCharacter(word, '-') || !TakeNumber(word, &to)) return false;
  const bool sends = message->kind == Kind::kSend;
  message->stage = sends ? from : to;
  message->peer = sends ? to : from;
  if (!TakeCharacter(word, ':')) return true;
  const std::size_t dot = word->rfind('.');  // names may have dots
  if (dot == std::string_view::npos || dot == 0) return false;
  message->name = word->substr(0, dot);
  word->remove_prefix(dot);
  return true;
}

std::optional<Instruction> ParseInstruction(std::string_view word) {
  if (word == "step") return Instruction{};
  const std::size_t letter = word.empty() ? std::string_view::npos : kLetters.find(word[0]);
  if (letter == std::string_view::npos) return std::nullopt;
  Instruction found;
  found.kind = static_cast<Kind>(letter);
  word.remove_prefix(1);
  if (found.kind == Kind::kReduceTied) {
    if (!TakeCharacter(&word, ':') || word.empty()) return std::nullopt;
    found.name = word;
    return found;
  }
  const bool message = found.is_message();
  if (message ? !TakeMessage(&word, &found) : !TakeNumber(&word, &found.stage)) return std::nullopt;
  if (found.kind != Kind::kAverage &&
      (!TakeCharacter(&word, '.') || !TakeNumber(&word, &found.micro_batch))) {
    return std::nullopt;
  }
  return word.empty() ? std::optional(found) : std::nullopt;
}

// "rank 0: F0.0 B0.0"
core::Status ParseRank(int line, const std::vector<std::string_view>& words, Schedule* schedule) {
  const std::string rank = std::to_string(schedule->ranks.size()) + ":";
  if (words.size() < 2 || words[0] != "rank" || words[1] != rank) {
    return WrongText(line, "this is where " + core::Quoted("rank " + rank) +
                               " belongs; each rank has one line, in order");
  }
  std::vector<Instruction>& all = schedule->ranks.emplace_back();
  for (std::size_t i = 2; i < words.size(); ++i) {
    const std::optional<Instruction> found = ParseInstruction(words[i]);
    if (!found) {
      return WrongText(line,
                       core::Quoted(words[i]) +
                           " is no instruction; allowed is what looks like F0.1, B0.1, S0-1.1, "
                           "R0-1.1, S0-3:skip.1, R0-3:skip.1, T:tied, A0 or step");
    }
    all.push_back(*found);
  }
  return core::Status::Ok();
}

}  // namespace

std::string Text(const Instruction& instruction) {
  const auto& [kind, stage, micro_batch, peer, name] = instruction;
  if (kind == Kind::kStep) return "step";
  std::string text(1, kLetters[static_cast<std::size_t>(kind)]);
  if (kind == Kind::kReduceTied) return text + ":" + name;
  if (instruction.is_message()) {
    const bool sends = kind == Kind::kSend;
    text += std::to_string(sends ? stage : peer) + "-" + std::to_string(sends ? peer : stage);
    if (!name.empty()) text += ":" + name;
  } else {
    text += std::to_string(stage);
  }
  return kind == Kind::kAverage ? text : text + "." + std::to_string(micro_batch);
}

std::string Describe(const Instruction& instruction) {
  const auto& [kind, stage, micro_batch, peer, name] = instruction;
  const std::string of_stage = " of stage " + std::to_string(stage);
  std::string what;
  switch (kind) {
    case Kind::kForward:
    case Kind::kBackward:
      what = std::string(kind == Kind::kForward ? "the forward" : "the backward") + " pass" +
             of_stage + " for micro-batch " + std::to_string(micro_batch);
      break;
    case Kind::kSend:
    case Kind::kReceive:
      what = std::string(kind == Kind::kSend ? "sends" : "receives") +
             (instruction.carries_gradient() ? " gradients" : " activations") + " of micro-batch " +
             std::to_string(micro_batch);
      break;
    case Kind::kReduceTied:
      what = "sums the gradients of tied parameter " + core::Quoted(name);
      break;
    case Kind::kAverage:
      what = "averages the gradients" + of_stage;
      break;
    case Kind::kStep:
      what = "the optimizer's step";
      break;
  }
  return core::Quoted(Text(instruction)) + " (" + what + ")";
}

std::string Text(const Schedule& schedule) {
  std::string text;
  for (std::size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    text += "rank " + std::to_string(rank) + ":";
    for (const Instruction& instruction : schedule.ranks[rank]) text += " " + Text(instruction);
    text += "\n";
  }
  return text;
}

core::Status ParseSchedule(std::string_view text, const PipelineShape& shape, Schedule* schedule) {
  if (core::Status status = CheckShape(shape); !status.ok()) return status;
  *schedule = {shape, {}};
  int number = 0;
  for (const std::string_view line : core::Split(text, '\n')) {
    ++number;
    const std::vector<std::string_view> words = core::Words(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    if (core::Status status = ParseRank(number, words, schedule); !status.ok()) return status;
  }
  const bool passes_alone =
      std::all_of(schedule->ranks.begin(), schedule->ranks.end(), [](const auto& rank) {
        return std::all_of(rank.begin(), rank.end(), [](const auto& i) { return i.computes(); });
      });
  if (passes_alone) Complete(schedule);
  return core::Status::Ok();
}

std::string Draw(const Schedule& schedule, const ScheduleFacts& facts, double unit) {
  const PipelineShape& shape = schedule.shape;
  const auto name_of = [&](const Instruction& pass) {
    std::string name = Text(pass);
    return shape.stages == shape.ranks ? name[0] + std::to_string(pass.micro_batch) : name;
  };
  const auto column_of = [&](double time) {
    return static_cast<std::size_t>(std::lround(time / unit));
  };
  std::vector<std::vector<std::string>> cells(
      schedule.ranks.size(), std::vector<std::string>(column_of(facts.length), "."));
  std::size_t width = 1;
  for (std::size_t rank = 0; rank < cells.size(); ++rank) {
    for (std::size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      const Instruction& pass = schedule.ranks[rank][i];
      if (!pass.computes()) continue;
      const std::size_t first = column_of(facts.spans[rank][i].begin);
      for (std::size_t c = first; c < column_of(facts.spans[rank][i].end); ++c) {
        cells[rank][c] = c == first ? name_of(pass) : "-";
        width = std::max(width, cells[rank][c].size());
      }
    }
  }
  std::string picture;
  for (std::size_t rank = 0; rank < cells.size(); ++rank) {
    std::string line = "rank " + std::to_string(rank);
    line.resize(std::max(line.size(), std::size_t{7}), ' ');
    for (const std::string& cell : cells[rank]) {
      line += " " + cell + std::string(width - cell.size(), cell == "-" ? '-' : ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    picture += line + "\n";
  }
  return picture;
}

}  // namespace sirtaki::parallel
