#include "tests/support/random_program.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "fusion/convert.h"
#include "fusion/planner.h"

namespace sirtaki::tests {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;

constexpr OpKind kKinds[] = {OpKind::kAllReduce,     OpKind::kBroadcast, OpKind::kAllGather,
                             OpKind::kAllGatherInto, OpKind::kReduce,    OpKind::kGather,
                             OpKind::kScatter,       OpKind::kAllToAll,  OpKind::kReduceScatter,
                             OpKind::kBarrier};
constexpr DType kDTypes[] = {DType::kU8,  DType::kI16,  DType::kI32, DType::kI64,
                             DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

std::uint64_t Mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15U + b + 0x632be59bd9b4e019U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

template <typename T>
void Put(std::byte* memory, T value) {
  std::memcpy(memory, &value, sizeof(value));
}

template <typename T>
T Get(const std::byte* memory) {
  T value;
  std::memcpy(&value, memory, sizeof(value));
  return value;
}

void Write(DType dtype, std::byte* memory, std::int64_t value) {
  switch (dtype) {
    case DType::kU8:
      return Put(memory, static_cast<std::uint8_t>(value));
    case DType::kI16:
      return Put(memory, static_cast<std::int16_t>(value));
    case DType::kI32:
      return Put(memory, static_cast<std::int32_t>(value));
    case DType::kI64:
      return Put(memory, value);
    case DType::kF64:
      return Put(memory, static_cast<double>(value));
    default: {
      const auto wide = static_cast<float>(value);
      fusion::Convert(DType::kF32, &wide, dtype, memory, 1);
    }
  }
}

std::int64_t Read(DType dtype, const std::byte* memory) {
  switch (dtype) {
    case DType::kU8:
      return Get<std::uint8_t>(memory);
    case DType::kI16:
      return Get<std::int16_t>(memory);
    case DType::kI32:
      return Get<std::int32_t>(memory);
    case DType::kI64:
      return Get<std::int64_t>(memory);
    case DType::kF64:
      return static_cast<std::int64_t>(Get<double>(memory));
    default: {
      float wide = 0;
      fusion::Convert(dtype, memory, DType::kF32, &wide, 1);
      return static_cast<std::int64_t>(wide);
    }
  }
}

std::int64_t Combine(ReduceOp op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kBitAnd:
      return a & b;
    case ReduceOp::kBitOr:
      return a | b;
    case ReduceOp::kBitXor:
      return a ^ b;
    default:
      return a + b;
  }
}

std::int64_t RowsOfTensor(const RandomPiece& piece, std::size_t tensor, std::int64_t rows) {
  return piece.tensors == 1 ? rows : rows + static_cast<std::int64_t>(tensor);
}

// The memory of one tensor under its collective.
struct Tensor {
  std::vector<std::byte> input;
  std::vector<std::byte> output;
  bool allocated = false;
};

// A piece on its way on one rank.
struct Running {
  const RandomPiece* piece = nullptr;
  core::WorkPtr work;
  std::shared_ptr<std::vector<Tensor>> tensors;
};

class Rank {
 public:
  Rank(const RandomProgram& program, session::Session& session, std::uint64_t seed,
       RandomPlace* place)
      : program_(program),
        session_(session),
        place_(place),
        rank_(session.topology().rank),
        random_(Mix(seed, static_cast<std::uint64_t>(rank_))) {}

  std::string Run() {
    numbers_.push_back(core::kWorldSet);
    const core::TimePoint never = core::TimePoint::max();
    for (std::size_t s = 1; s < program_.sets.size(); ++s) {
      core::SetNumber number = 0;
      Check(session_.AddSet(program_.sets[s], never, &number), "adding a set");
      numbers_.push_back(number);
    }
    for (std::size_t step = 0; step < program_.steps.size() && problems_.empty(); ++step) {
      RunStep(step);
    }
    for (std::size_t s = 1; s < program_.sets.size(); ++s) {
      if (program_.removed[s]) Check(session_.RemoveSet(numbers_[s], never), "removing a set");
    }
    return problems_;
  }

 private:
  void Problem(const std::string& what) {
    if (problems_.size() < 2000) {
      problems_ += "\n  rank " + std::to_string(rank_) + ": " + what;
    }
  }

  bool Check(const core::Status& status, const std::string& what) {
    if (!status.ok()) Problem(what + ": " + status.ToString());
    return status.ok();
  }

  void Dawdle() {
    const auto what = random_() % 60;
    if (what == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    if (what < 10) std::this_thread::yield();
  }

  void RunStep(std::size_t step) {
    const std::vector<RandomPiece>& pieces = program_.steps[step];
    std::vector<std::size_t> named;
    std::map<std::size_t, std::vector<std::size_t>> unnamed;  // by set, in the common order
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (!program_.sets[pieces[i].set].Contains(rank_)) continue;
      if (pieces[i].named) {
        named.push_back(i);
      } else {
        unnamed[pieces[i].set].push_back(i);
      }
    }
    std::shuffle(named.begin(), named.end(), random_);
    std::vector<Running> running;
    for (;;) {
      std::erase_if(unnamed, [](const auto& line) { return line.second.empty(); });
      const std::size_t choices = (named.empty() ? 0 : 1) + unnamed.size();
      if (choices == 0) break;
      std::size_t choice = random_() % choices;
      std::size_t next = 0;
      if (!named.empty() && choice == 0) {
        next = named.back();
        named.pop_back();
      } else {
        if (!named.empty()) --choice;
        auto line = std::next(unnamed.begin(), static_cast<std::ptrdiff_t>(choice));
        next = line->second.front();
        line->second.erase(line->second.begin());
      }
      Dawdle();
      running.push_back(Make(pieces[next], next));
      if (!Check(session_.Submit(running.back().work, random_() % 4 == 0), Name(pieces[next]))) {
        return;
      }
    }
    std::shuffle(running.begin(), running.end(), random_);
    for (Running& r : running) {
      Dawdle();
      const core::Status status = session_.Wait(*r.work->handle);
      r.work->handle->Observe();
      if (!Check(status, Name(*r.piece))) continue;
      AwaitResult(*r.work);
      Compare(r);
    }
  }

  std::string Name(const RandomPiece& piece) const {
    std::ostringstream text;
    text << core::OpKindName(piece.kind) << "(" << core::ReduceOpName(piece.op) << ") of "
         << piece.tensors << " " << core::DTypeName(piece.dtype) << " [" << piece.rows << ", "
         << piece.width << "] in ranks " << program_.sets[piece.set].ToString() << " root "
         << piece.root;
    return text.str();
  }

  Running Make(const RandomPiece& piece, std::size_t number) {
    Running running;
    running.piece = &piece;
    running.tensors = std::make_shared<std::vector<Tensor>>(piece.tensors);
    const core::SetNumber set = numbers_[piece.set];
    const core::Key key = piece.named ? core::Key::Named(set, "piece " + std::to_string(number))
                                      : core::Key::Unnamed(set, 0);
    if (piece.tensors == 1) {
      running.work = MakeWork(piece, 0, running);
    } else {
      running.work = std::make_shared<core::Work>();
      core::Signature whole;
      whole.kind = piece.kind;
      for (std::size_t t = 0; t < piece.tensors; ++t) {
        core::WorkPtr part = MakeWork(piece, t, running);
        whole.parts.push_back(part->request.signature());
        running.work->parts.push_back(std::move(part));
      }
      running.work->request.asked = std::make_shared<const core::Signature>(std::move(whole));
    }
    running.work->request.key = key;
    running.work->keep_alive = running.tensors;
    return running;
  }

  // AwaitResult waits for the work's parts, if it has some.
  void AwaitResult(const core::Work& work) {
    if (place_ == nullptr) return;
    for (const core::WorkPtr& part : work.parts) place_->AwaitResult(*part);
    if (work.parts.empty()) place_->AwaitResult(work);
  }

  core::WorkPtr MakeWork(const RandomPiece& piece, std::size_t t, Running& running) {
    auto signature = std::make_shared<core::Signature>();
    const bool elsewhere = place_ != nullptr && piece.kind != OpKind::kBarrier;
    core::WorkPtr work =
        elsewhere ? place_->MakeWork(signature.get()) : std::make_shared<core::Work>();
    Fill(piece, t, running, *work, std::move(signature));
    if (elsewhere) place_->MakeInput(*work, (*running.tensors)[t].input);
    return work;
  }

  void Fill(const RandomPiece& piece, std::size_t t, Running& running, core::Work& work,
            std::shared_ptr<core::Signature> signature) {
    signature->kind = piece.kind;
    signature->dtype = piece.dtype;
    if (core::Reduces(piece.kind)) signature->reduction = piece.op;
    if (core::HasRoot(piece.kind)) signature->root = piece.root;
    const std::int64_t rows = GivenRows(piece, t);
    if (piece.kind != OpKind::kBarrier) {
      if (!core::FirstDimensionVaries(piece.kind)) signature->shape.push_back(rows);
      signature->shape.push_back(piece.width);
    }
    work.request.asked = std::move(signature);
    if (piece.kind == OpKind::kBarrier) return;

    Tensor& tensor = (*running.tensors)[t];
    const std::size_t element = core::SizeOf(piece.dtype);
    const std::int64_t count = rows * piece.width;
    tensor.input.resize(static_cast<std::size_t>(count) * element);
    for (std::int64_t i = 0; i < count; ++i) {
      Write(piece.dtype, tensor.input.data() + static_cast<std::size_t>(i) * element,
            program_.ValueAt(piece, t, rank_, i));
    }
    work.input = tensor.input.data();
    if (!core::FirstDimensionVaries(piece.kind)) {
      const bool reads_nothing = piece.kind == OpKind::kReduce && piece.root != rank_;
      if (!reads_nothing) {
        tensor.output.resize(static_cast<std::size_t>(ResultCount(piece, t, rows)) * element);
        work.output = tensor.output.data();
      }
      tensor.allocated = true;
      return;
    }
    work.rows = rows;
    if (piece.kind == OpKind::kAllToAll) {
      for (const int to : program_.sets[piece.set].ToVector()) {
        work.splits.push_back(program_.SplitOf(piece, rank_, to));
      }
    }
    const std::size_t row_bytes = static_cast<std::size_t>(piece.width) * element;
    work.allocate_output = [&tensor, row_bytes](const std::vector<std::int64_t>& received) {
      std::int64_t all = 0;
      for (const std::int64_t r : received) all += r;
      tensor.output.resize(static_cast<std::size_t>(all) * row_bytes);
      tensor.allocated = true;
      return static_cast<void*>(tensor.output.data());
    };
  }

  // The rows of this rank's input.
  std::int64_t GivenRows(const RandomPiece& piece, std::size_t t) const {
    if (piece.kind == OpKind::kAllToAll) {
      std::int64_t rows = 0;
      for (const int to : program_.sets[piece.set].ToVector()) {
        rows += program_.SplitOf(piece, rank_, to);
      }
      return rows;
    }
    if (piece.kind == OpKind::kScatter) {
      return piece.root == rank_ ? RowsOfTensor(piece, t, piece.rows) : 0;
    }
    if (core::FirstDimensionVaries(piece.kind)) {
      return RowsOfTensor(piece, t, program_.RowsAt(piece, rank_));
    }
    return RowsOfTensor(piece, t, piece.rows);
  }

  std::int64_t ResultCount(const RandomPiece& piece, std::size_t, std::int64_t rows) const {
    const core::RankRanges& members = program_.sets[piece.set];
    if (piece.kind == OpKind::kAllGatherInto) return members.Count() * rows * piece.width;
    if (piece.kind == OpKind::kReduceScatter) {
      return core::RowsOf(rows, members.Count(), members.IndexOf(rank_)) * piece.width;
    }
    return rows * piece.width;
  }

  std::vector<std::int64_t> Expected(const RandomPiece& piece, std::size_t t) const {
    const core::RankRanges& members = program_.sets[piece.set];
    const std::vector<int> ranks = members.ToVector();
    const auto n = static_cast<std::int64_t>(ranks.size());
    const std::int64_t here = members.IndexOf(rank_);
    std::vector<std::int64_t> values;
    const auto add = [&](int from, std::int64_t begin, std::int64_t count) {
      for (std::int64_t i = begin; i < begin + count; ++i) {
        values.push_back(program_.ValueAt(piece, t, from, i));
      }
    };
    const std::int64_t rows = RowsOfTensor(piece, t, piece.rows);
    switch (piece.kind) {
      case OpKind::kBroadcast:
        add(piece.root, 0, rows * piece.width);
        break;
      case OpKind::kAllGatherInto:
        for (const int from : ranks) add(from, 0, rows * piece.width);
        break;
      case OpKind::kGather:
        if (piece.root != rank_) break;
        [[fallthrough]];
      case OpKind::kAllGather:
        for (const int from : ranks) {
          add(from, 0, RowsOfTensor(piece, t, program_.RowsAt(piece, from)) * piece.width);
        }
        break;
      case OpKind::kScatter:
        add(piece.root, core::FirstRowOf(rows, n, here) * piece.width,
            core::RowsOf(rows, n, here) * piece.width);
        break;
      case OpKind::kAllToAll:
        for (const int from : ranks) {
          std::int64_t begin = 0;
          for (const int to : ranks) {
            if (to == rank_) break;
            begin += program_.SplitOf(piece, from, to);
          }
          add(from, begin * piece.width, program_.SplitOf(piece, from, rank_) * piece.width);
        }
        break;
      case OpKind::kReduce:
        if (piece.root != rank_) break;
        [[fallthrough]];
      default: {
        const bool scattered = piece.kind == OpKind::kReduceScatter;
        const std::int64_t begin = scattered ? core::FirstRowOf(rows, n, here) * piece.width : 0;
        const std::int64_t count =
            scattered ? core::RowsOf(rows, n, here) * piece.width : rows * piece.width;
        for (std::int64_t i = begin; i < begin + count; ++i) {
          std::int64_t value = program_.ValueAt(piece, t, ranks[0], i);
          for (std::size_t m = 1; m < ranks.size(); ++m) {
            value = Combine(piece.op, value, program_.ValueAt(piece, t, ranks[m], i));
          }
          values.push_back(piece.op == ReduceOp::kAverage ? value / n : value);
        }
      }
    }
    return values;
  }

  void Compare(const Running& running) {
    const RandomPiece& piece = *running.piece;
    if (piece.kind == OpKind::kBarrier) return;
    const std::size_t element = core::SizeOf(piece.dtype);
    for (std::size_t t = 0; t < piece.tensors; ++t) {
      const std::vector<std::byte>& output = (*running.tensors)[t].output;
      const std::vector<std::int64_t> expected = Expected(piece, t);
      if (output.size() != expected.size() * element) {
        Problem(Name(piece) + " has " + std::to_string(output.size() / element) +
                " elements instead of " + std::to_string(expected.size()));
        continue;
      }
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::int64_t value = Read(piece.dtype, output.data() + i * element);
        if (value == expected[i]) continue;
        Problem(Name(piece) + ": element " + std::to_string(i) + " of tensor " + std::to_string(t) +
                " is " + std::to_string(value) + " instead of " + std::to_string(expected[i]));
        break;
      }
    }
  }

  const RandomProgram& program_;
  session::Session& session_;
  RandomPlace* const place_;
  const int rank_;
  std::mt19937_64 random_;
  std::vector<core::SetNumber> numbers_;  // by index of the set
  std::string problems_;
};

}  // namespace

RandomProgram::RandomProgram(std::uint64_t seed, int size_or_any) {
  std::mt19937_64 random(seed);
  const auto below = [&random](std::uint64_t n) { return random() % n; };
  size = size_or_any > 0 ? size_or_any : 2 + static_cast<int>(below(5));
  const auto hosts = 1 + below(3);
  for (int r = 0; r < size; ++r) host_of_rank.push_back(static_cast<int>(below(hosts)));
  small_bytes = below(2) == 0 ? 64 << 10 : static_cast<std::int64_t>(below(400));
  fusion_bytes = below(3) == 0 ? static_cast<std::int64_t>(below(500)) : 64 << 20;
  sets.push_back(core::RankRanges::Span(0, size - 1));
  for (std::uint64_t s = below(5); s > 0; --s) {
    core::RankRanges members;
    while (members.empty()) {
      for (int r = 0; r < size; ++r) {
        if (below(2) == 0) members.Add(r);
      }
    }
    sets.push_back(std::move(members));
  }
  for (std::size_t s = 0; s < sets.size(); ++s) removed.push_back(below(2) == 0);
  steps.resize(1 + below(2));
  for (std::vector<RandomPiece>& step : steps) {
    for (std::uint64_t i = 1 + below(25); i > 0; --i) {
      RandomPiece piece;
      piece.kind = kKinds[below(std::size(kKinds))];
      piece.dtype = kDTypes[below(std::size(kDTypes))];
      do {
        piece.op = static_cast<ReduceOp>(below(core::kReduceOpCount - 1));
      } while (!core::IsDefined(piece.op, piece.dtype) ||
               (piece.op == ReduceOp::kAverage && !core::IsInteger(piece.dtype)));
      piece.set = below(sets.size());
      piece.named = below(4) != 0;
      const std::vector<int> ranks = sets[piece.set].ToVector();
      if (core::HasRoot(piece.kind)) piece.root = ranks[below(ranks.size())];
      piece.width = static_cast<std::int64_t>(1 + below(4));
      piece.rows = static_cast<std::int64_t>(below(8) == 0 ? below(800) : below(12));
      piece.salt = random();
      if (piece.kind != OpKind::kBarrier && piece.kind != OpKind::kAllToAll && below(4) == 0) {
        piece.tensors = 2 + below(3);
      }
      step.push_back(piece);
    }
  }
}

std::int64_t RandomProgram::RowsAt(const RandomPiece& piece, int rank) const {
  return static_cast<std::int64_t>(Mix(piece.salt, static_cast<std::uint64_t>(rank)) % 5);
}

std::int64_t RandomProgram::SplitOf(const RandomPiece& piece, int rank, int to) const {
  return static_cast<std::int64_t>(Mix(piece.salt, static_cast<std::uint64_t>(rank * 64 + to)) % 4);
}

std::int64_t RandomProgram::ValueAt(const RandomPiece& piece, std::size_t tensor, int rank,
                                    std::int64_t index) const {
  const std::uint64_t hash = Mix(Mix(piece.salt + tensor, static_cast<std::uint64_t>(rank)),
                                 static_cast<std::uint64_t>(index));
  return static_cast<std::int64_t>(piece.op == ReduceOp::kProduct ? 1 + hash % 2 : hash % 8);
}

void StartedGroups::Note(const core::RunBatch& batch) {
  const std::vector<fusion::Group> groups = fusion::Plan(batch, /*deterministic=*/false);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    names_.push_back("set " + std::to_string(batch.set) + " batch " + std::to_string(batch.number) +
                     " group " + std::to_string(g) +
                     (groups[g].lane == fusion::Lane::kSmall ? " small" : " large"));
  }
}

std::string RunRandomProgram(const RandomProgram& program, session::Session& session,
                             std::uint64_t seed, RandomPlace* place) {
  return Rank(program, session, seed, place).Run();
}

}  // namespace sirtaki::tests
