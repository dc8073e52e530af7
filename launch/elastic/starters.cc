#include "launch/elastic/starters.h"

#include <csignal>
#include <cstddef>

#include "launch/base/rank_messages.h"
#include "launch/job/own_launcher.h"

namespace sirtaki::launch {

using core::Status;

struct Starters::Starter {
  Starter(Loop* loop, JobOutput* to)
      : output(to), child(loop, [this](Stream stream) { return Pass(stream); }) {}
  // False if there is nothing to be read now.
  bool Pass(Stream stream) {
    const std::string bytes = child.Read(stream);
    output->AppendOfLauncher(stream, bytes);
    return !bytes.empty();
  }

  JobOutput* const output;
  Child child;
  Batch batch;
};

Status Starters::Start(const std::string& host, const Batch& batch,
                       const std::vector<std::pair<std::string, std::string>>& variables) {
  auto starter = std::make_shared<Starter>(loop_, output_);
  starter->batch = batch;
  Command command{WordsFor(host, batch), variables, {}};
  command.own_group = true;  // signals of the terminal are for this process
  command.input = Command::kNoInput;
  int error = 0;
  Status status = starter->child.Start(command, &error);
  if (status.ok()) all_.push_back(std::move(starter));
  return status;
}

// The plan's command, for these workers alone.
std::vector<std::string> Starters::WordsFor(const std::string& host, const Batch& batch) const {
  std::vector<std::string> words;
  for (std::size_t i = 0; i < plan_.command.size(); ++i) {
    const std::string& word = plan_.command[i];
    if (word == kRankFlag) {
      words.insert(words.end(), plan_.command.begin() + static_cast<std::ptrdiff_t>(i),
                   plan_.command.end());
      break;
    }
    if (word == "--here" || word == "-H") {
      ++i;
    } else {
      words.push_back(word);
    }
    if (word != "-H") continue;
    words.insert(words.end(), {"-H", host + ":" + std::to_string(batch.count),
                               std::string(kFirstFlag), std::to_string(batch.first)});
    if (IsThisMachine(host, machine_)) words.insert(words.end(), {"--here", host});
  }
  return words;
}

void Starters::Kill(WorkerId id, const std::function<bool(WorkerId)>& is_wanted) {
  for (const auto& starter : all_) {
    const WorkerId end = starter->batch.first + starter->batch.count;
    if (id < starter->batch.first || id >= end) continue;
    bool is_of_use = false;
    for (WorkerId one = starter->batch.first; one < end; ++one) is_of_use |= is_wanted(one);
    if (!is_of_use) starter->child.Signal(SIGKILL);
  }
}

void Starters::Ask() {
  for (const auto& starter : all_) {
    for (const Stream stream : kStreams) {
      if (!output_->HasWaiting(stream)) starter->child.Ask(stream);
    }
  }
}

std::vector<std::pair<Starters::Batch, EndMessage>> Starters::TakeEnded() {
  std::vector<std::pair<Batch, EndMessage>> ended;
  for (const auto& starter : all_) {
    const auto end = starter->child.Ended();
    if (!end) continue;
    starter->child.Drain();
    ended.emplace_back(starter->batch, *end);
  }
  std::erase_if(all_, [](const auto& starter) { return !starter->child.running(); });
  return ended;
}

}  // namespace sirtaki::launch
