#include "tests/conformance/calls.h"

#include <chrono>
#include <functional>

namespace sirtaki::tests::conformance {
namespace {

using Tensors = std::vector<at::Tensor>;

// Ends a case that hangs, with its name, before the test's own watchdog does.
constexpr auto kPatience = std::chrono::seconds(45);

// The forms of one collective as functions of the tensors alone. What it does not come in is empty.
struct Forms {
  std::function<Outcome(const at::Tensor&)> blocking;
  std::function<at::Tensor(const at::Tensor&)> in_place;
  std::function<Handle(const at::Tensor&)> async;
  std::function<Handle(const at::Tensor&)> async_in_place;
  std::function<Outcome(const Tensors&)> grouped;
  std::function<Tensors(const Tensors&)> grouped_in_place;
  std::function<GroupedHandle(const Tensors&)> grouped_async;
};

Outcome ToOutcome(at::Tensor tensor) { return {{std::move(tensor)}, {}}; }
Outcome ToOutcome(Tensors tensors) { return {std::move(tensors), {}}; }
Outcome ToOutcome(const std::vector<AlltoallResult>& results) {
  Outcome outcome;
  for (const AlltoallResult& result : results) {
    outcome.tensors.push_back(result.tensor);
    outcome.received_splits.push_back(result.received_splits);
  }
  return outcome;
}
Outcome ToOutcome(const AlltoallResult& result) { return ToOutcome(std::vector{result}); }

// A public function as an object, whose overloads take one tensor and a list of them.
#define SIRTAKI_OBJECT_OF(function) [](const auto&... arguments) { return function(arguments...); }

// A public function with everything bound but its tensors. `root`: one or no argument.
template <typename In, typename Function, typename Options, typename... Root>
auto Bind(Function function, const Options& options, Root... root) {
  return [=](const In& in) { return function(in, root..., options); };
}

template <typename In, typename Function, typename Options, typename... Root>
auto BindResult(Function function, const Options& options, Root... root) {
  return [=](const In& in) { return ToOutcome(function(in, root..., options)); };
}

template <typename Blocking, typename Async, typename Options, typename... Root>
Forms BindForms(Blocking blocking, Async async, const Options& options, Root... root) {
  Forms forms;
  forms.blocking = BindResult<at::Tensor>(blocking, options, root...);
  forms.async = Bind<at::Tensor>(async, options, root...);
  forms.grouped = BindResult<Tensors>(blocking, options, root...);
  forms.grouped_async = Bind<Tensors>(async, options, root...);
  return forms;
}

template <typename InPlace, typename AsyncInPlace, typename Options, typename... Root>
Forms WithInPlace(Forms forms, InPlace in_place, AsyncInPlace async, const Options& options,
                  Root... root) {
  forms.in_place = Bind<at::Tensor>(in_place, options, root...);
  forms.async_in_place = Bind<at::Tensor>(async, options, root...);
  forms.grouped_in_place = Bind<Tensors>(in_place, options, root...);
  return forms;
}

// Both forms of a function of this name, for BindForms and WithInPlace.
#define SIRTAKI_FORMS_OF(name, suffix) \
  SIRTAKI_OBJECT_OF(name##suffix), SIRTAKI_OBJECT_OF(name##_async##suffix)

template <typename Options>
Options Common(const Arguments& arguments) {
  return Options().name(arguments.name).process_set(arguments.process_set).timeout(kPatience);
}

template <typename Options>
Options Reducing(const Problem& problem, const Arguments& arguments) {
  return Common<Options>(arguments)
      .op(PublicOp(problem.op))
      .prescale(arguments.prescale)
      .postscale(arguments.postscale);
}

template <typename Options>
Options Dealing(const Arguments& arguments) {
  return Common<Options>(arguments).splits(arguments.splits);
}

Forms ReductionForms(const Problem& problem, const Arguments& with) {
  if (problem.collective == Collective::kReduceScatter) {
    return BindForms(SIRTAKI_FORMS_OF(reducescatter, ),
                     Reducing<ReducescatterOptions>(problem, with));
  }
  if (problem.collective == Collective::kReduce) {
    const auto options = Reducing<ReduceOptions>(problem, with);
    return WithInPlace(BindForms(SIRTAKI_FORMS_OF(reduce, ), options, with.root),
                       SIRTAKI_FORMS_OF(reduce, _), options, with.root);
  }
  const auto options = Reducing<AllreduceOptions>(problem, with)
                           .compression(with.compression)
                           .compression_scope(CompressionScope::Everywhere);
  return WithInPlace(BindForms(SIRTAKI_FORMS_OF(allreduce, ), options),
                     SIRTAKI_FORMS_OF(allreduce, _), options);
}

Forms MovementForms(const Problem& problem, const Arguments& with) {
  switch (problem.collective) {
    case Collective::kBroadcast: {
      const auto options = Common<BroadcastOptions>(with);
      return WithInPlace(BindForms(SIRTAKI_FORMS_OF(broadcast, ), options, with.root),
                         SIRTAKI_FORMS_OF(broadcast, _), options, with.root);
    }
    case Collective::kAllGather:
      return BindForms(SIRTAKI_FORMS_OF(allgather, ), Common<AllgatherOptions>(with));
    case Collective::kAllGatherInto:
      return BindForms(SIRTAKI_FORMS_OF(allgather_into, ), Common<AllgatherOptions>(with));
    case Collective::kGather:
      return BindForms(SIRTAKI_FORMS_OF(gather, ), Common<GatherOptions>(with), with.root);
    case Collective::kScatter:
    case Collective::kScatterSplits:
      return BindForms(SIRTAKI_FORMS_OF(scatter, ), Dealing<ScatterOptions>(with), with.root);
    default:
      return BindForms(SIRTAKI_FORMS_OF(alltoall, ), Dealing<AlltoallOptions>(with));
  }
}

Forms FormsFor(const Problem& problem, const Arguments& arguments) {
  return Reduces(problem.collective) ? ReductionForms(problem, arguments)
                                     : MovementForms(problem, arguments);
}

}  // namespace

Outcome CallAndWait(const Problem& problem, Form form, const std::vector<at::Tensor>& tensors,
                    const Arguments& arguments) {
  const Forms forms = FormsFor(problem, arguments);
  switch (form) {
    case Form::kInPlace:
      return ToOutcome(forms.in_place(tensors[0]));
    case Form::kGrouped:
      return forms.grouped(tensors);
    case Form::kGroupedInPlace:
      return ToOutcome(forms.grouped_in_place(tensors));
    default:
      return forms.blocking(tensors[0]);
  }
}

Started CallAsync(const Problem& problem, Form form, const std::vector<at::Tensor>& tensors,
                  const Arguments& arguments) {
  const Forms forms = FormsFor(problem, arguments);
  if (form == Form::kGroupedAsync) return {{}, forms.grouped_async(tensors)};
  return {form == Form::kAsync ? forms.async(tensors[0]) : forms.async_in_place(tensors[0]), {}};
}

Outcome WaitFor(const Started& started) {
  if (started.group.valid()) {
    return {synchronize(started.group), received_splits(started.group)};
  }
  return {{synchronize(started.one)}, {received_splits(started.one)}};
}

ReduceOp PublicOp(core::ReduceOp op) {
  switch (op) {
    case core::ReduceOp::kSum:
      return ReduceOp::Sum;
    case core::ReduceOp::kAverage:
      return ReduceOp::Average;
    case core::ReduceOp::kMin:
      return ReduceOp::Min;
    case core::ReduceOp::kMax:
      return ReduceOp::Max;
    case core::ReduceOp::kProduct:
      return ReduceOp::Product;
    case core::ReduceOp::kBitAnd:
      return ReduceOp::BitAnd;
    case core::ReduceOp::kBitOr:
      return ReduceOp::BitOr;
    case core::ReduceOp::kBitXor:
      return ReduceOp::BitXor;
    case core::ReduceOp::kAdasum:
      return ReduceOp::Adasum;
  }
  return ReduceOp::Sum;
}

}  // namespace sirtaki::tests::conformance
