# sirtaki_discover_suites(<program> <prefix> <folder> <label> <environment>): read by ctest, each time it starts. One test for each
# suite of a GoogleTest program: a process for each case would cost LibTorch's programs and the sanitizers' more than the cases
# themselves. <environment>: as ctest takes ENVIRONMENT_MODIFICATION.
function(sirtaki_discover_suites program prefix folder label environment)
  if(NOT EXISTS "${program}")
    add_test("${prefix}${program}_NOT_BUILT" "${program}_NOT_BUILT")
    set_tests_properties("${prefix}${program}_NOT_BUILT" PROPERTIES LABELS "${label}")
    return()
  endif()
  execute_process(COMMAND "${program}" --gtest_list_tests WORKING_DIRECTORY "${folder}" TIMEOUT 120
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${program} --gtest_list_tests: ${code}\n${output}")
  endif()
  # Lines that begin at the margin are suites: "Suite." or "Instance/Suite.  # TypeParam = ...".
  string(REGEX MATCHALL "(^|\n)[A-Za-z][A-Za-z0-9_/]*\\." suites "${output}")
  string(REGEX REPLACE "\n" "" suites "${suites}")
  list(REMOVE_DUPLICATES suites)
  foreach(suite IN LISTS suites)
    if(suite MATCHES "^DISABLED_|/DISABLED_")
      continue()
    endif()
    string(REGEX REPLACE "\\.$" "" name "${prefix}${suite}")
    get_property(other GLOBAL PROPERTY "sirtaki_suite_${name}")
    if(other)
      message(FATAL_ERROR "${name} is a suite of ${other} and of ${program}: rename one of them.")
    endif()
    set_property(GLOBAL PROPERTY "sirtaki_suite_${name}" "${program}")
    add_test("${name}" "${program}" "--gtest_filter=${suite}*")
    set_tests_properties("${name}" PROPERTIES
      WORKING_DIRECTORY "${folder}" LABELS "${label}" TIMEOUT 900 ENVIRONMENT_MODIFICATION "${environment}")
  endforeach()
endfunction()
