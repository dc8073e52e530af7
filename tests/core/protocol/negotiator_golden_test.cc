// Scripted scenarios that anyone can read: tests/core/protocol/golden/.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "tests/support/golden.h"
#include "tests/support/negotiation_sim.h"

namespace sirtaki::tests {
namespace {

class Script {
 public:
  // What has happened since the last time.
  std::string Finish() {
    std::string happened = happened_.str();
    happened_.str("");
    return happened;
  }

  void Command(const std::string& line) {
    std::istringstream in(line);
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    const std::string& verb = words[0];
    const auto number = [&](std::size_t i) { return std::stoi(words.at(i)); };
    const auto rest = [&](std::size_t i) {
      std::string text;
      for (; i < words.size(); ++i) text += (text.empty() ? "" : " ") + words[i];
      return text;
    };
    if (verb == "world") return World(words);
    if (verb == "set") {
      core::RankRanges members;
      for (std::size_t i = 2; i < words.size(); ++i) members.Add(number(i));
      options_.sets[static_cast<core::SetNumber>(number(1))] = members;
      return;
    }
    Start();
    if (verb == "submit") {
      Submit(words);
    } else if (verb == "join") {
      sim_->node(number(1)).Join(static_cast<core::SetNumber>(number(2)), sim_->now());
    } else if (verb == "leave") {
      sim_->node(number(1)).Leave(rest(2), sim_->now());
    } else if (verb == "fault") {
      sim_->node(number(1)).RaiseFault(core::StatusCode::kAborted, rest(2), "");
    } else if (verb == "stop") {
      sim_->Stop(number(1));
    } else if (verb == "pump") {
      sim_->Pump(number(1));
    } else if (verb == "settle") {
      sim_->Settle();
    } else if (verb == "run") {
      sim_->Run(std::chrono::milliseconds(number(1)), std::chrono::milliseconds(10));
    } else {
      throw std::runtime_error("unknown command: " + line);
    }
    for (int r = 0; r < sim_->size(); ++r) {
      if (sim_->node(r).faulted() && told_.insert("fault" + std::to_string(r)).second) {
        happened_ << r << ": fault: " << sim_->node(r).cause().ToStatus().ToString() << "\n";
      }
      if (sim_->node(r).closed() && told_.insert("closed" + std::to_string(r)).second) {
        happened_ << r << ": closed\n";
      }
    }
  }

 private:
  static std::string Option(const std::vector<std::string>& words, const std::string& name,
                            const std::string& otherwise) {
    for (const std::string& word : words) {
      if (word.rfind(name + "=", 0) == 0) return word.substr(name.size() + 1);
    }
    return otherwise;
  }

  void World(const std::vector<std::string>& words) {
    options_.host_of_rank.clear();
    for (std::size_t i = 1; i < words.size() && words[i].find('=') == std::string::npos; ++i) {
      options_.host_of_rank.push_back(std::stoi(words[i]));
    }
    hide_pings_ = Option(words, "pings", "shown") == "hidden";
    options_.arity = std::stoi(Option(words, "arity", "8"));
    options_.negotiator.id_capacity =
        static_cast<std::size_t>(std::stoi(Option(words, "ids", "100")));
    options_.negotiator.stall_warning =
        std::chrono::milliseconds(std::stoi(Option(words, "warning", "0")));
    options_.negotiator.stall_limit =
        std::chrono::milliseconds(std::stoi(Option(words, "limit", "0")));
    options_.negotiator.ping_interval = std::chrono::milliseconds(100);
    options_.negotiator.peer_timeout = std::chrono::milliseconds(500);
  }

  void Start() {
    if (sim_) return;
    sim_ = std::make_unique<NegotiationSim>(options_);
    sim_->on_send = [this](int from, int to, const core::MessageBody& body) {
      Sent(from, to, body);
    };
    sim_->on_batch = [this](int rank, const core::DecidedBatch& batch) { Executed(rank, batch); };
    sim_->on_warning = [this](int rank, const core::StallWarning& w) {
      happened_ << rank << ": warning: " << core::StallText(w) << "\n";
    };
  }

  void Submit(const std::vector<std::string>& words) {
    std::vector<std::int64_t> shape;
    std::istringstream dims(words.at(3));
    for (std::string d; std::getline(dims, d, 'x');) shape.push_back(std::stoll(d));
    const auto set = static_cast<core::SetNumber>(std::stoi(Option(words, "set", "0")));
    const int rank = std::stoi(words.at(1));
    core::Request request =
        RequestOf(words.at(2) == "#" ? core::Key::Unnamed(set, calls_[{rank, set}]++)
                                     : core::Key::Named(set, words.at(2)),
                  AllReduceOf(shape));
    if (std::find(words.begin(), words.end(), "absent") != words.end()) request.absent = {true};
    for (const char bit : Option(words, "absent", "")) request.absent.push_back(bit == '1');
    request.invalid = Option(words, "invalid", "");
    std::vector<core::Request> requests;
    requests.push_back(std::move(request));
    for (const auto& request : requests) sim_->node(rank).Submit(request, sim_->now());
  }

  void Sent(int from, int to, const core::MessageBody& body) {
    const bool alive = std::holds_alternative<core::PingMessage>(body) ||
                       std::holds_alternative<core::PongMessage>(body);
    if (alive && hide_pings_) return;
    std::ostream& out = happened_ << from << " -> " << to << ": ";
    if (const auto* report = std::get_if<core::ReportMessage>(&body)) {
      out << "report ack=" << report->ack;
      for (const auto& item : report->items) {
        if (const auto* ready = std::get_if<core::ReadyItem>(&item)) {
          out << ", ready ";
          const bool by_id = ready->id != core::kNoId;
          if (by_id) out << "id " << ready->id;
          if (by_id && ready->set != 0) out << " of process set " << ready->set;
          if (by_id && ready->key.form == core::Key::Form::kUnnamed) out << " for ";
          if (!by_id || ready->key.form == core::Key::Form::kUnnamed) out << ready->key.ToString();
          if (ready->variants.size() > 1) out << " in " << ready->variants.size() << " variants";
          if (!ready->silent.empty()) out << " silent " << ready->silent.ToString();
        } else if (const auto* joined = std::get_if<core::JoinedItem>(&item)) {
          out << ", joined set " << joined->set << " last " << joined->last;
        } else if (const auto* left = std::get_if<core::LeftItem>(&item)) {
          out << ", left " << left->ranks.ToString() << ": " << left->why;
        } else {
          out << ", stalled " << std::get<core::StalledItem>(item).key.ToString();
        }
      }
    } else if (const auto* stream = std::get_if<core::StreamMessage>(&body)) {
      out << "stream first=" << stream->first;
      for (const core::Batch& batch : stream->batches) {
        out << ", batch " << batch.number << " of set " << batch.set << " [";
        for (std::size_t i = 0; i < batch.entries.size(); ++i) {
          out << (i ? ", " : "");
          Entry(out, batch.entries[i]);
        }
        out << "]";
      }
    } else if (const auto* query = std::get_if<core::QueryMessage>(&body)) {
      out << "query " << query->key.ToString();
    } else if (const auto* answer = std::get_if<core::AnswerMessage>(&body)) {
      out << "answer " << answer->key.ToString() << " missing " << answer->missing.ToString();
    } else if (const auto* ping = std::get_if<core::PingMessage>(&body)) {
      out << "ping set " << ping->set;
    } else if (std::holds_alternative<core::PongMessage>(body)) {
      out << "pong";
    } else if (const auto* fault = std::get_if<core::FaultMessage>(&body)) {
      out << "fault from rank " << fault->cause.rank;
    } else {
      out << (std::holds_alternative<core::ByeAckMessage>(body) ? "bye acknowledged"
                                                                : "bye confirmed");
    }
    out << "\n";
  }

  static void Entry(std::ostream& out, const core::Entry& entry) {
    if (const auto* run = std::get_if<core::RunEntry>(&entry)) {
      out << "run ";
      if (run->id != core::kNoId) out << "id " << run->id;
      if (run->id == core::kNoId) out << run->key.ToString();
      if (run->new_id != core::kNoId) out << " as id " << run->new_id;
    } else if (const auto* fail = std::get_if<core::FailEntry>(&entry)) {
      out << "fail " << fail->key.ToString();
    } else if (const auto* evict = std::get_if<core::EvictEntry>(&entry)) {
      out << "evict";
      for (const auto id : evict->ids) out << " " << id;
    } else if (const auto* join = std::get_if<core::JoinDoneEntry>(&entry)) {
      out << "join done, last " << join->last;
    } else {
      out << "bye";
    }
  }

  void Executed(int rank, const core::DecidedBatch& batch) {
    for (const core::Decided& decided : batch.entries) {
      happened_ << rank << ": ";
      if (const auto* run = std::get_if<core::DecidedRun>(&decided)) {
        happened_ << "runs " << run->key.ToString();
        if (!run->silent.empty()) happened_ << " silent " << run->silent.ToString();
        if (core::AllAbsent(run->absent)) {
          happened_ << " absent everywhere";
        } else if (!run->absent.empty()) {
          happened_ << " absent ";
          for (const bool bit : run->absent) happened_ << (bit ? '1' : '0');
        }
      } else if (const auto* fail = std::get_if<core::DecidedFail>(&decided)) {
        happened_ << "fails: " << fail->why.ToString();
        const core::Origin& origin = fail->why.origin();
        if (origin.rank >= 0) happened_ << " {rank " << origin.rank << "}";
        if (!origin.tensor.empty()) happened_ << " {tensor " << origin.tensor << "}";
      } else {
        happened_ << "join done, last " << std::get<core::DecidedJoin>(decided).last;
      }
      happened_ << "\n";
    }
  }

  SimOptions options_;
  bool hide_pings_ = false;
  std::unique_ptr<NegotiationSim> sim_;
  std::map<std::pair<int, core::SetNumber>, std::uint64_t> calls_;
  std::set<std::string> told_;
  std::ostringstream happened_;
};

constexpr const char* kFolder = "tests/core/protocol/golden";

class NegotiatorGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NegotiatorGoldenTest, HappensAsWritten) {
  Script script;
  PlayGolden(
      kFolder, GetParam(), [&script](const std::string& line) { script.Command(line); },
      [&script] { return script.Finish(); });
}

INSTANTIATE_TEST_SUITE_P(Scripts, NegotiatorGoldenTest, ::testing::ValuesIn(GoldenScripts(kFolder)),
                         [](const auto& script) { return script.param; });

}  // namespace
}  // namespace sirtaki::tests
